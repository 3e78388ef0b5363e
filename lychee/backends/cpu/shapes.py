"""Ops that only move elements: each maps an index of its result to an index of its operand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .llvm import Builder, Val, integer, literal, register
from .ttir import Op, Value

if TYPE_CHECKING:
    from .frame import Frame, Index

RUN = 16  # elements, the most lanes a vector of 32-bit numbers has
Map = Callable[["Frame", Op, Value, "Index", int], Val]


def plus(b: Builder, x: Val, y: Val, lanes: int) -> Val:
    """The sum of two indices."""
    align = math.gcd(x.align, y.align)
    if x.lanes or y.lanes:
        kind = register(x.elem, lanes)
        return Val(x.elem, b.op(f"add {kind} {b.vector(x, lanes)}, {b.vector(y, lanes)}"), lanes)
    step = b.add(x.step or "0", y.step or "0", x.elem)
    return Val(x.elem, b.add(x.ref, y.ref, x.elem), step="" if step == "0" else step, align=align)


def times(b: Builder, x: Val, factor: int, lanes: int) -> Val:
    """An index multiplied by a constant."""
    if factor == 1:
        return x
    if x.lanes:
        kind = register(x.elem, lanes)
        return Val(x.elem, b.op(f"mul {kind} {x.ref}, {b.splat(str(factor), x.elem, lanes)}"), lanes)
    step = b.mul(x.step, str(factor), x.elem) if x.step else ""
    return Val(x.elem, b.mul(x.ref, str(factor), x.elem), step=step, align=x.align * factor)


def flat(b: Builder, index: Index, shape: tuple[int, ...], lanes: int) -> Val:
    """The row-major place of an index."""
    place, stride = integer(0), 1
    for component, size in zip(reversed(index), reversed(shape), strict=True):
        if size > 1:
            place = plus(b, times(b, component, stride, lanes), place, lanes)
        stride *= size
    return place


def _low_and_high(b: Builder, x: Val, size: int, lanes: int) -> tuple[Val, Val]:
    """(x mod size, x div size) of a non-negative index; size is a power of two."""
    shift, mask = size.bit_length() - 1, size - 1
    known = x.literal
    if known is not None:
        return integer(known & mask, x.elem), integer(known >> shift, x.elem)
    if x.lanes:
        kind = register(x.elem, lanes)
        masks, shifts = (b.splat(str(c), x.elem, lanes) for c in (mask, shift))
        lows, highs = b.op(f"and {kind} {x.ref}, {masks}"), b.op(f"lshr {kind} {x.ref}, {shifts}")
        return Val(x.elem, lows, lanes), Val(x.elem, highs, lanes)
    base = literal(x.ref)
    low_ref = str(base & mask) if base is not None else b.op(f"and {x.elem} {x.ref}, {mask}")
    high_ref = str(base >> shift) if base is not None else b.op(f"lshr {x.elem} {x.ref}, {shift}")
    low = Val(x.elem, low_ref, align=min(x.align, size))
    high = Val(x.elem, high_ref, align=max(1, x.align // size))
    if x.is_uniform:
        return low, high
    step = literal(x.step)
    span = (step or 0) * lanes
    if step is not None and step > 0 and span & (span - 1) == 0 and x.align % span == 0:
        # The lanes occupy bits of the index that its base leaves zero.
        if size >= span:
            return Val(x.elem, low_ref, step=x.step, align=low.align), high
        if size <= step:
            return low, Val(x.elem, high_ref, step=str(step // size), align=high.align)
        below = ", ".join(f"{x.elem} {step * i & mask}" for i in range(lanes))
        above = ", ".join(f"{x.elem} {step * i >> shift}" for i in range(lanes))
        upper = b.op(f"add {register(x.elem, lanes)} {b.splat(high_ref, x.elem, lanes)}, <{above}>")
        return Val(x.elem, f"<{below}>", lanes), Val(x.elem, upper, lanes)
    return _low_and_high(b, b.as_vector(x, lanes), size, lanes)


def unflat(b: Builder, place: Val, shape: tuple[int, ...], lanes: int) -> Index:
    index: list[Val] = []
    for size in reversed(shape):
        low, place = _low_and_high(b, place, size, lanes)
        index.insert(0, low)
    return tuple(index)


def _splat(f: Frame, op: Op, value: Value, index: Index, lanes: int) -> Val:
    return f.env[op.operands[0]]


def _range(f: Frame, op: Op, value: Value, index: Index, lanes: int) -> Val:
    return plus(f.b, index[0], integer(op.attrs["start"]), lanes)


def _expand_dims(f: Frame, op: Op, value: Value, index: Index, lanes: int) -> Val:
    axis = op.attrs["axis"]
    return f.at(op.operands[0], index[:axis] + index[axis + 1 :], lanes)


def _broadcast(f: Frame, op: Op, value: Value, index: Index, lanes: int) -> Val:
    source = op.operands[0]
    pairs = zip(index, source.type.shape, value.type.shape, strict=True)
    return f.at(source, tuple(i if old == new else integer(0) for i, old, new in pairs), lanes)


def _trans(f: Frame, op: Op, value: Value, index: Index, lanes: int) -> Val:
    moved = dict(zip(op.attrs["order"], index, strict=True))
    return f.at(op.operands[0], tuple(moved[d] for d in range(len(index))), lanes)


def _reshape(f: Frame, op: Op, value: Value, index: Index, lanes: int) -> Val:
    source = op.operands[0]
    found: list[Val] = []
    for ours, theirs in matched_axes(value.type.shape, source.type.shape):
        place = flat(f.b, index[ours], value.type.shape[ours], lanes)
        found += unflat(f.b, place, source.type.shape[theirs], lanes)
    return f.at(source, tuple(found), lanes)


def matched_axes(ours: tuple[int, ...], theirs: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """The shortest runs of axes of two shapes that hold equally many elements."""
    i = j = 0
    while i < len(ours) or j < len(theirs):
        first, second = i, j
        n, m = 1, 1
        while first == i or second == j or n != m:
            if j >= len(theirs) or (i < len(ours) and n <= m):
                n, i = n * ours[i], i + 1
            else:
                m, j = m * theirs[j], j + 1
            if i == len(ours) and j == len(theirs):
                break
        yield slice(first, i), slice(second, j)


def keeps_runs(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether a reshape leaves elements in runs of RUN along the axes that it splits or joins."""
    pairs = ((before[ours], after[theirs]) for ours, theirs in matched_axes(before, after))
    return all(a == b or min((*a, RUN)[len(a) - 1], (*b, RUN)[len(b) - 1]) >= RUN for a, b in pairs if a and b)


def _choose(b: Builder, condition: Val, yes: Val, no: Val, lanes: int) -> Val:
    if condition.literal is not None:
        return yes if condition.literal else no
    n = 0 if condition.is_uniform and yes.is_uniform and no.is_uniform else lanes
    flag = b.vector(condition, n)
    kind = register(yes.elem, n)
    return Val(
        yes.elem, b.op(f"select {register('i1', n)} {flag}, {kind} {b.vector(yes, n)}, {kind} {b.vector(no, n)}"), n
    )


def _compare(b: Builder, predicate: str, x: Val, bound: int, lanes: int) -> Val:
    n = 0 if x.is_uniform else lanes
    if x.literal is not None:
        return integer(int(x.literal < bound if predicate == "slt" else x.literal == bound), "i1")
    limit = b.vector(integer(bound, x.elem), n)
    return Val("i1", b.op(f"icmp {predicate} {register(x.elem, n)} {b.vector(x, n)}, {limit}"), n)


def _join(f: Frame, op: Op, value: Value, index: Index, lanes: int) -> Val:
    first = _compare(f.b, "eq", index[-1], 0, lanes)
    sides = [f.at(o, index[:-1], lanes) for o in op.operands]
    return _choose(f.b, first, sides[0], sides[1], lanes)


def _split(f: Frame, op: Op, value: Value, index: Index, lanes: int) -> Val:
    return f.at(op.operands[0], (*index, integer(value.index)), lanes)


def _cat(f: Frame, op: Op, value: Value, index: Index, lanes: int) -> Val:
    size = op.operands[0].type.shape[0]
    before = _compare(f.b, "slt", index[0], size, lanes)
    within = _low_and_high(f.b, index[0], size, lanes)[0]
    sides = [f.at(o, (within, *index[1:]), lanes) for o in op.operands]
    return _choose(f.b, before, sides[0], sides[1], lanes)


def _gather(f: Frame, op: Op, value: Value, index: Index, lanes: int) -> Val:
    source, indices = op.operands
    axis = op.attrs["axis"]
    where = f.at(indices, index, lanes)
    if where.elem != "i32":
        n = where.lanes
        where = Val("i32", f.b.op(f"trunc {register(where.elem, n)} {f.b.vector(where, n)} to {register('i32', n)}"), n)
    return f.at(source, (*index[:axis], where, *index[axis + 1 :]), lanes)


MAPS: dict[str, Map] = {
    "tt.splat": _splat,
    "tt.make_range": _range,
    "tt.expand_dims": _expand_dims,
    "tt.broadcast": _broadcast,
    "tt.trans": _trans,
    "tt.reshape": _reshape,
    "tt.join": _join,
    "tt.split": _split,
    "tt.cat": _cat,
    "tt.gather": _gather,
}

Place = tuple[int | None, ...]
UNKNOWN = -1


def operand_places(op: Op, place: Place) -> list[tuple[Value, Place]]:
    """For every tile operand: which axis of the result's loop nest each of its axes follows (None: stays at 0)."""
    name, shape = op.name, op.results[0].type.shape if op.results else ()
    found: list[tuple[Value, Place]] = []
    for operand in op.operands:
        if not operand.type.is_tile:
            continue
        if name == "tt.expand_dims":
            axis = op.attrs["axis"]
            where: Place = place[:axis] + place[axis + 1 :]
        elif name == "tt.broadcast":
            pairs = zip(place, operand.type.shape, shape, strict=True)
            where = tuple(p if old == new else None for p, old, new in pairs)
        elif name == "tt.trans":
            moved = dict(zip(op.attrs["order"], place, strict=True))
            where = tuple(moved[d] for d in range(len(place)))
        elif name == "tt.reshape":
            ours = operand.type.shape
            runs = [(place[b], ours[a] == shape[b], ours[a]) for a, b in matched_axes(ours, shape)]
            where = tuple(p for kept, same, axes in runs for p in (kept if same else (UNKNOWN,) * len(axes)))
        elif name in MAPS:
            where = (UNKNOWN,) * len(operand.type.shape)
        else:
            where = place
        found.append((operand, where))
    return found
