"""Blocks, branches and loops. Carried scalars live in slots, carried tiles in buffers, inductions in a counter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from . import dot, elementwise, memory, reduce
from .demand import stored_by_columns
from .errors import UnsupportedError
from .frame import Buffer, Frame, Index, Induction
from .llvm import Val, integer
from .memory import whole, write_buffer
from .nests import mask_terms, nest, pick_axis, pulled
from .order import induction_step
from .ttir import Block, Op, Type, Value

if TYPE_CHECKING:
    from .shapes import Place

NOTHING = {"gpu.barrier", "ttg.barrier", "ttg.local_barrier", "tt.debug_barrier", "llvm.intr.assume", "tt.assert"}
Cell = Buffer | str  # where a carried value lives: a tile's buffer or a scalar's slot


def fill(f: Frame, pairs: Sequence[tuple[Value, Buffer]]) -> None:
    """Evaluate tiles of one shape into buffers, in one loop nest."""
    shape = pairs[0][1].shape
    roots: list[tuple[Value, Place]] = [(value, whole(value)) for value, _ in pairs]
    axis = pick_axis(f, shape, roots)

    def body(index: Index, lanes: int) -> None:
        values = [f.at(value, index, lanes) for value, _ in pairs]
        for (_, buffer), found in zip(pairs, values, strict=True):
            write_buffer(f, buffer, index, found, lanes)

    with f.scope():
        nest(f, shape, axis, mask_terms(f, roots, []), body)


def hold(f: Frame, values: list[Value]) -> None:
    """Give the forced tiles their buffers."""
    if values:
        buffers = [f.buffer(v.type, turned=stored_by_columns(f, v)) for v in values]
        fill(f, list(zip(values, buffers, strict=True)))
        f.buffers.update(zip(values, buffers, strict=True))
        values.clear()


def block(f: Frame, ops: Sequence[Op]) -> None:
    """The ops of a block, without its terminator."""
    pending: list[Value] = []
    for op in ops:
        handler = HANDLERS.get(op.name)
        if handler is not None:
            hold(f, pending)
            handler(f, op)
            continue
        if op.name in NOTHING:
            continue
        for result in op.results:
            if result.type.is_tile:
                if result in f.forced:
                    if pending and pending[0].type.shape != result.type.shape:
                        hold(f, pending)
                    pending.append(result)
                else:
                    check_supported(op)
            else:
                f.env[result] = scalar(f, op)
        if not op.results:
            raise UnsupportedError.of(op, "this backend does not know it")
    hold(f, pending)


def check_supported(op: Op) -> None:
    from .shapes import MAPS

    if op.name not in MAPS and op.name != "tt.load" and not elementwise.supports(op.name):
        raise UnsupportedError.of(op, "this backend does not know it")


def scalar(f: Frame, op: Op) -> Val:
    if op.name == "tt.load":
        return memory.load(f, op, (), 0)
    if op.name in ("tt.get_program_id", "tt.get_num_programs"):
        return Val("i32", ("%p" if op.name == "tt.get_program_id" else "%g") + "xyz"[op.attrs["axis"]])
    return elementwise.apply(f.b, op, [f.env[o] for o in op.operands], 0)


def _cell(f: Frame, kind: Type) -> Cell:
    return f.buffer(kind) if kind.is_tile else f.b.slot(kind.elem)


def _bind(f: Frame, values: Sequence[Value], cells: Sequence[Cell]) -> None:
    for value, cell in zip(values, cells, strict=True):
        if isinstance(cell, Buffer):
            f.buffers[value] = cell
        else:
            f.env[value] = f.b.get(cell, value.type.elem)


def assign(f: Frame, values: Sequence[Value], cells: Sequence[Cell]) -> None:
    """All cells take their values at once: none sees another's new value."""
    scalars = [(f.env[v], c) for v, c in zip(values, cells, strict=True) if isinstance(c, str)]
    tiles = [(v, c) for v, c in zip(values, cells, strict=True) if isinstance(c, Buffer) and f.buffers.get(v) is not c]
    readers: dict[str, list[tuple[Buffer, bool]]] = {}
    for value, cell in tiles:
        for tile, place in pulled(f, [(value, whole(value))]):
            if tile in f.buffers:
                readers.setdefault(f.buffers[tile].ref, []).append((cell, place == whole(tile)))
    direct: list[tuple[Value, Buffer]] = []
    copied: list[tuple[Value, Buffer]] = []
    for value, cell in tiles:
        alone = all(reader is cell and same for reader, same in readers.get(cell.ref, []))
        (direct if alone else copied).append((value, cell))
    moves = [(value, f.buffer(value.type), cell) for value, cell in copied]
    _fill_by_shape(f, [(value, temporary) for value, temporary, _ in moves])
    _fill_by_shape(f, direct)
    for _, temporary, cell in moves:
        _copy(f, temporary, cell)
    for found, slot in scalars:
        f.b.put(found, slot)


def _fill_by_shape(f: Frame, pairs: Sequence[tuple[Value, Buffer]]) -> None:
    shapes: dict[tuple[int, ...], list[tuple[Value, Buffer]]] = {}
    for value, buffer in pairs:
        shapes.setdefault(buffer.shape, []).append((value, buffer))
    for group in shapes.values():
        fill(f, group)


def _copy(f: Frame, source: Buffer, target: Buffer) -> None:
    args = (("ptr", target.ref), ("ptr", source.ref), ("i64", str(target.bytes)), ("i1", "false"))
    f.b.call("void", "llvm.memcpy.p0.p0.i64", *args)


def for_(f: Frame, op: Op) -> None:
    if dot.is_contraction(f, op):
        dot.contraction(f, op)
        return
    body = op.regions[0][0]
    with counted(f, op, body.args[1:]):
        block(f, body.ops[:-1])


@contextmanager
def counted(f: Frame, op: Op, carried: Sequence[Value]) -> Iterator[None]:
    """The trips of an scf.for around what is emitted inside, with `carried` of its arguments in their cells."""
    body = op.regions[0][0]
    rows = zip(body.args[1:], op.operands[3:], body.ops[-1].operands, op.results, strict=True)
    slots: list[tuple[Value, str]] = []
    held: list[tuple[Value, Value, Value, Value]] = []
    for argument, initial, yielded, result in rows:
        step = induction_step(argument, yielded)
        if argument not in carried:
            continue
        if step is None:
            held.append((argument, initial, yielded, result))
            continue
        slot = f.b.slot("i64")
        f.b.put(integer(0, "i64"), slot)
        f.inductions[argument] = f.inductions[result] = Induction(initial, slot)
        slots.append((step, slot))
    cells = [_cell(f, argument.type) for argument, *_ in held]
    for (argument, _, yielded, _), cell in zip(held, cells, strict=True):
        if isinstance(cell, Buffer) and dot.grows_in_place(f, argument, yielded):
            f.targets[yielded] = cell
    with f.scope():
        assign(f, [initial for _, initial, _, _ in held], cells)
    low, high, by = (f.env[o] for o in op.operands[:3])
    if by.literal is None:  # loops step upwards: no trips otherwise
        up = f.b.op(f"icmp sgt {by.elem} {by.ref}, 0")
        high = Val(high.elem, f.b.op(f"select i1 {up}, {high.elem} {high.ref}, {low.elem} {low.ref}"))
    signed = not op.attrs.get("unsignedCmp")
    with f.b.loop(low.ref, high.ref, by.ref, low.elem, signed) as index, f.scope():
        f.env[body.args[0]] = Val(low.elem, index)
        _bind(f, [argument for argument, *_ in held], cells)
        yield
        assign(f, [yielded for _, _, yielded, _ in held], cells)
        for step, slot in slots:
            _advance(f, step, slot)
    _bind(f, [result for *_, result in held], cells)


def _advance(f: Frame, step: Value, slot: str) -> None:
    known = f.strides.constant(step) if step.type.is_tile else None
    by = str(known) if known is not None else f.b.widen(f.env[step].ref, step.type.elem)
    f.b.put(Val("i64", f.b.add(f.b.get(slot, "i64").ref, by, "i64")), slot)


def while_(f: Frame, op: Op) -> None:
    before, after = op.regions[0][0], op.regions[1][0]
    cells = [_cell(f, a.type) for a in before.args]
    with f.scope():
        assign(f, op.operands, cells)
    condition = before.ops[-1]
    passed: list[Cell] = []
    for value in condition.operands[1:]:
        same = value in before.args
        passed.append(cells[before.args.index(value)] if same else _cell(f, value.type))
    head, body, done = f.b.labels("head", "body", "done")
    f.b.branch(head)
    f.b.place(head)
    weight = f.b.weight
    f.b.weight *= 4
    with f.b.region(), f.scope():
        _bind(f, before.args, cells)
        block(f, before.ops[:-1])
        fresh = [(v, c) for v, c in zip(condition.operands[1:], passed, strict=True) if v not in before.args]
        assign(f, [v for v, _ in fresh], [c for _, c in fresh])
        f.b.emit(f"br i1 {f.env[condition.operands[0]].ref}, label %{body}, label %{done}")
        f.b.place(body)
        with f.scope():
            _bind(f, after.args, passed)
            block(f, after.ops[:-1])
            assign(f, after.ops[-1].operands, cells)
    f.b.weight = weight
    f.b.branch(head)
    f.b.place(done)
    _bind(f, op.results, passed)


def if_(f: Frame, op: Op) -> None:
    cells = [_cell(f, r.type) for r in op.results]
    labels = f.b.labels("then", "else", "endif")
    f.b.emit(f"br i1 {f.env[op.operands[0]].ref}, label %{labels[0]}, label %{labels[1]}")
    for number, label in enumerate(labels[:2]):
        f.b.place(label)
        if number < len(op.regions) and op.regions[number]:
            ops = op.regions[number][0].ops
            with f.b.region(), f.scope():
                block(f, ops[:-1])
                assign(f, ops[-1].operands, cells)
        f.b.branch(labels[2])
    f.b.place(labels[2])
    _bind(f, op.results, cells)


def join(f: Frame, op: Op) -> None:
    """Two tiles, element after element: interleaved while both are in registers."""
    result = op.results[0]
    buffer = f.buffer(result.type)
    shape = op.operands[0].type.shape
    roots = [(o, whole(o)) for o in op.operands]
    flat_buffer = Buffer(buffer.ref, (*shape[:-1], shape[-1] * 2), buffer.elem)

    def body(index: Index, lanes: int) -> None:
        values = [f.at(o, index, lanes) for o in op.operands]
        if not lanes:
            for side, value in enumerate(values):
                write_buffer(f, buffer, (*index, integer(side)), value, 0)
            return
        x, y = (f.b.vector(v, lanes) for v in values)
        order = [i // 2 + (i % 2) * lanes for i in range(2 * lanes)]
        woven = Val(buffer.elem, f.b.shuffle(x, y, buffer.elem, lanes, order), 2 * lanes)
        at = index[-1]
        place = Val(at.elem, f.b.mul(at.ref, "2", at.elem), step="1", align=at.align * 2)
        write_buffer(f, flat_buffer, (*index[:-1], place), woven, 2 * lanes)

    with f.scope():
        nest(f, shape, len(shape) - 1, mask_terms(f, roots, []), body)
    f.buffers[result] = buffer


def unsplat(f: Frame, op: Op) -> None:
    source = op.operands[0]
    f.env[op.results[0]] = f.at(source, tuple(integer(0) for _ in source.type.shape), 0)


def function(f: Frame, blocks: list[Block], leave: str) -> None:
    """A function's blocks; returning is a branch to `leave`."""
    cells = {b.name: [_cell(f, a.type) for a in b.args] for b in blocks[1:]}
    for number, here in enumerate(blocks):
        if number:
            f.b.place(f"block.{here.name}")
        with f.b.region(), f.scope():
            if number:
                _bind(f, here.args, cells[here.name])
            block(f, here.ops[:-1])
            _terminate(f, here.ops[-1], cells, leave)


def _terminate(f: Frame, op: Op, cells: dict[str, list[Cell]], leave: str) -> None:
    if op.name == "tt.return":
        f.b.branch(leave)
        return
    if op.name == "cf.br":
        assign(f, op.operands, cells[op.successors[0].name])
        f.b.branch(f"block.{op.successors[0].name}")
        return
    if op.name != "cf.cond_br":
        raise UnsupportedError.of(op, "this backend does not know it")
    _, yes, _ = op.attrs["operandSegmentSizes"]
    sides = (op.operands[1 : 1 + yes], op.operands[1 + yes :])
    labels = f.b.labels("then", "else")
    f.b.emit(f"br i1 {f.env[op.operands[0]].ref}, label %{labels[0]}, label %{labels[1]}")
    for label, target, values in zip(labels, op.successors, sides, strict=True):
        f.b.place(label)
        with f.b.region(), f.scope():
            assign(f, values, cells[target.name])
        f.b.branch(f"block.{target.name}")


Handler = Callable[[Frame, Op], None]
HANDLERS: dict[str, Handler] = {
    "tt.store": memory.store,
    "tt.atomic_rmw": memory.atomic,
    "tt.atomic_cas": memory.atomic,
    "tt.reduce": reduce.reduce,
    "tt.scan": reduce.scan,
    "tt.histogram": reduce.histogram,
    "tt.dot": dot.dot,
    "tt.join": join,
    "tt.unsplat": unsplat,
    "scf.for": for_,
    "scf.while": while_,
    "scf.if": if_,
}
