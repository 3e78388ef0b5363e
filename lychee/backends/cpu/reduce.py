"""Reductions, scans and histograms.

A reduction's order is fixed by the length of its axis and the CPU's vector: `unroll` vectors of partial results, each
lane taking every (lanes * unroll)-th element, then a tree over the vectors and over the lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from . import elementwise
from .errors import UnsupportedError
from .frame import Buffer, Frame, Index
from .llvm import BYTES, Builder, Val, floating, integer, register
from .memory import every_index, whole, write_buffer
from .nests import Term, mask_terms, reduction_axis, sweep, width
from .shapes import Place
from .ttir import Block, Op, Value

Put = Callable[[list[Val], int, list[Val]], None]
PARTIALS = 4  # vectors of partial results: enough to hide the latency of an addition
NAN = float("nan")


def combine(f: Frame, op: Op, left: Sequence[Val], right: Sequence[Val], lanes: int) -> list[Val]:
    """The op's combine region applied lane by lane."""
    block: Block = op.regions[0][0]
    known: dict[Value, Val] = dict(zip(block.args, [*left, *right], strict=True))
    for inner in block.ops[:-1]:
        if inner.regions or not inner.results:
            raise UnsupportedError.of(inner, "a combine function must be straight-line arithmetic; use tl.where")
        operands = [known[o] if o in known else f.env[o] for o in inner.operands]
        known[inner.results[0]] = elementwise.apply(f.b, inner, operands, lanes)
    results = block.ops[-1].operands
    return [f.b.as_vector(known[r] if r in known else f.env[r], lanes) for r in results]


def identities(op: Op) -> list[Val] | None:
    """Values that combine with x to exactly x, where the region is one op known to have them."""
    ops = op.regions[0][0].ops
    if len(ops) != 2:
        return None
    elem = op.results[0].type.elem
    bits = 8 * BYTES[elem]
    found = {
        "arith.addf": -0.0,
        "arith.mulf": 1.0,
        "arith.maxnumf": NAN,
        "arith.minnumf": NAN,
        "arith.maximumf": -float("inf"),
        "arith.minimumf": float("inf"),
        "arith.addi": 0,
        "arith.muli": 1,
        "arith.xori": 0,
        "arith.ori": 0,
        "arith.andi": -1,
        "arith.maxsi": -(1 << bits - 1),
        "arith.minsi": (1 << bits - 1) - 1,
        "arith.maxui": 0,
        "arith.minui": -1,
    }.get(ops[0].name)
    if found is None:
        return None
    return [floating(found, elem) if isinstance(found, float) else integer(found, elem)]


def reduce(f: Frame, op: Op) -> None:
    axis: int = op.attrs["axis"]
    shape = op.operands[0].type.shape
    roots: list[tuple[Value, Place]] = [(o, whole(o)) for o in op.operands]
    terms = mask_terms(f, roots, [])
    lane_axis = reduction_axis(f, shape, roots, axis)
    results = [f.buffer(r.type) if r.type.is_tile else None for r in op.results]
    index: list[Val | None] = [None] * len(shape)

    def put(values: list[Val], lanes: int, at: list[Val]) -> None:
        rest = tuple(v for d, v in enumerate(at) if d != axis)
        for result, buffer, value in zip(op.results, results, values, strict=True):
            if buffer is None:
                f.env[result] = value
            else:
                write_buffer(f, buffer, rest, value, lanes)

    def outer(axes: list[int]) -> None:
        if axes:
            with f.loop("0", str(shape[axes[0]]), 1) as at:
                index[axes[0]] = at
                outer(axes[1:])
                index[axes[0]] = None
        elif lane_axis == axis:
            put(_along_lanes(f, op, terms, index, axis), 0, [i or integer(0) for i in index])
        else:
            _across(f, op, terms, index, axis, lane_axis, put)

    with f.scope():
        outer([d for d in range(len(shape)) if d not in (axis, lane_axis)])
    for result, buffer in zip(op.results, results, strict=True):
        if buffer is not None:
            f.buffers[result] = buffer


def _along_lanes(f: Frame, op: Op, terms: Sequence[Term], index: list[Val | None], axis: int) -> list[Val]:
    b = f.b
    size = op.operands[0].type.shape[axis]
    lanes = width(f, size)
    n = lanes if lanes > 1 else 0
    unroll = min(PARTIALS, size // lanes)
    elems = [o.type.elem for o in op.operands]
    slots = [[b.slot(e, n) for e in elems] for _ in range(unroll)]
    start = identities(op)

    def values(at: list[Val]) -> list[Val]:
        return [b.as_vector(f.at(o, tuple(at), n), n) for o in op.operands]

    def fold(places: list[list[Val]]) -> None:
        for slot, at in zip(slots, places, strict=True):
            held = [b.get(s, e, n) for s, e in zip(slot, elems, strict=True)]
            for s, value in zip(slot, combine(f, op, held, values(at), n), strict=True):
                b.put(value, s)

    def begin(places: list[list[Val]]) -> None:
        for slot, at in zip(slots, places, strict=True):
            for s, value in zip(slot, values(at), strict=True):
                b.put(value, s)

    first = lanes * unroll
    if start is None:
        with f.scope():
            sweep(f, [], index, axis, first, begin, unroll=unroll)
    else:
        for slot in slots:
            b.put(b.as_vector(start[0], n), slot[0])
    with f.scope():
        sweep(f, terms, index, axis, size, fold, unroll=unroll, start=0 if start is not None else first)
    held = [[b.get(s, e, n) for s, e in zip(slot, elems, strict=True)] for slot in slots]
    while len(held) > 1:
        half = len(held) // 2
        held = [combine(f, op, held[i], held[i + half], n) for i in range(half)]
    return _tree(f, op, held[0], n)


def _tree(f: Frame, op: Op, values: list[Val], lanes: int) -> list[Val]:
    """Combine the lanes of vectors, upper half onto lower, down to scalars."""
    b = f.b
    while lanes > 1:
        half = lanes // 2
        parts = []
        for order in (range(half), range(half, lanes)):
            parts.append([Val(v.elem, b.shuffle(v.ref, v.ref, v.elem, lanes, list(order)), half) for v in values])
        values, lanes = combine(f, op, parts[0], parts[1], half), half
    if values[0].lanes:
        values = [b.lane(v, 0) for v in values]
    return values


def _across(
    f: Frame, op: Op, terms: Sequence[Term], index: list[Val | None], axis: int, lane_axis: int, put: Put
) -> None:
    """Lanes run along another axis: one after the other along the reduced one."""
    b = f.b
    shape = op.operands[0].type.shape
    lanes = width(f, shape[lane_axis])
    n = lanes if lanes > 1 else 0
    elems = [o.type.elem for o in op.operands]
    slots = [b.slot(e, n) for e in elems]
    usable = [t for t in terms if axis not in t.axes]

    def column(places: list[list[Val]]) -> None:
        at = places[0]

        def values(k: Val) -> list[Val]:
            here = tuple(k if d == axis else i for d, i in enumerate(at))
            return [b.as_vector(f.at(o, here, n), n) for o in op.operands]

        for slot, value in zip(slots, values(integer(0)), strict=True):
            b.put(value, slot)
        with f.scope():
            if shape[axis] > 1:
                with f.loop("1", str(shape[axis]), 1) as k:
                    held = [b.get(s, e, n) for s, e in zip(slots, elems, strict=True)]
                    for slot, value in zip(slots, combine(f, op, held, values(k), n), strict=True):
                        b.put(value, slot)
        put([b.get(s, e, n) for s, e in zip(slots, elems, strict=True)], n, at)

    sweep(f, usable, index, lane_axis, shape[lane_axis], column)


def scan(f: Frame, op: Op) -> None:
    """An inclusive scan, element after element."""
    b = f.b
    axis: int = op.attrs["axis"]
    shape = op.operands[0].type.shape
    buffers = [f.buffer(r.type) for r in op.results]
    elems = [o.type.elem for o in op.operands]
    slots = [b.slot(e) for e in elems]
    size = shape[axis]

    def line(rest: Index) -> None:
        def at(k: Val) -> Index:
            where = (
                integer(size - 1 - k.literal)
                if k.literal is not None
                else Val("i32", b.sub(str(size - 1), k.ref, "i32"))
            )
            place = where if op.attrs.get("reverse") else k
            return (*rest[:axis], place, *rest[axis:])

        def step(k: Val, first: bool) -> None:
            values = [b.as_vector(f.at(o, at(k), 0), 0) for o in op.operands]
            if not first:
                held = [b.get(s, e) for s, e in zip(slots, elems, strict=True)]
                values = combine(f, op, held, values, 0)
            for slot, buffer, value in zip(slots, buffers, values, strict=True):
                b.put(value, slot)
                write_buffer(f, buffer, at(k), value, 0)

        step(integer(0), True)
        if size > 1:
            with f.loop("1", str(size), 1) as k:
                step(k, False)

    with f.scope():
        every_index(f, shape[:axis] + shape[axis + 1 :], line)
    f.buffers.update(zip(op.results, buffers, strict=True))


def histogram(f: Frame, op: Op) -> None:
    """Counts of the values 0 .. bins - 1; others, and masked ones, count nowhere."""
    b = f.b
    source, result = op.operands[0], op.results[0]
    bins = result.type.shape[0]
    elem = source.type.elem
    buffer: Buffer = f.buffer(result.type)

    def clear(index: Index) -> None:
        write_buffer(f, buffer, index, integer(0, result.type.elem), 0)

    def count(index: Index) -> None:
        value = f.at(source, index, 0)
        inside = b.op(f"icmp ult {register(elem)} {value.ref}, {bins}")
        if len(op.operands) > 1:
            inside = b.both(inside, f.at(op.operands[1], index, 0).ref)
        place = Val("i32", _to_i32(b, value))
        with b.when(inside), f.scope():
            held = f_read(f, buffer, place)
            write_buffer(f, buffer, (place,), Val(held.elem, b.add(held.ref, "1", held.elem)), 0)

    with f.scope():
        every_index(f, (bins,), clear)
        every_index(f, source.type.shape, count)
    f.buffers[result] = buffer


def f_read(f: Frame, buffer: Buffer, place: Val) -> Val:
    from .memory import read_buffer

    return read_buffer(f, buffer, (place,), 0)


def _to_i32(b: Builder, value: Val) -> str:
    if value.elem == "i32":
        return value.ref
    return b.op(f"{'trunc' if value.elem == 'i64' else 'zext'} {value.elem} {value.ref} to i32")
