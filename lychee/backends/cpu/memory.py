"""Loads, stores and atomics. Nothing is read or written behind a false mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .casts import from_storage, to_storage
from .errors import UnsupportedError
from .llvm import BYTE_COST, BYTES, STORED, Builder, Val, integer, literal, register, suffix
from .nests import has_mask, mask_terms, nest, pick_axis
from .shapes import Place, flat
from .ttir import Op, Value

if TYPE_CHECKING:
    from .frame import Buffer, Frame, Index


def stored(elem: str, lanes: int) -> str:
    """The LLVM type of a value in memory."""
    scalar = STORED.get(elem, elem)
    return f"<{lanes} x {scalar}>" if lanes else scalar


def is_contiguous(pointer: Val, elem: str) -> bool:
    return pointer.is_affine and literal(pointer.step) == BYTES[elem]


def read(b: Builder, pointer: Val, elem: str, lanes: int, mask: Val | None = None, other: Val | None = None) -> Val:
    """What lies at the pointer(s); `other` (default 0) where the mask is false."""
    if mask is not None and mask.ref == "true":
        mask = None
    if mask is not None and mask.ref == "false":
        return other or zero(b, elem, 0)
    align = BYTES[elem]
    if pointer.is_uniform and (mask is None or mask.is_uniform):
        return _read_one(b, pointer, elem, mask, other)
    kind = stored(elem, lanes)
    if is_contiguous(pointer, elem) and mask is None:
        return from_storage(b, b.op(f"load {kind}, ptr {pointer.ref}, align {align}"), elem, lanes)
    flags = b.vector(mask if mask is not None else integer(1, "i1"), lanes)
    filler = to_storage(b, b.as_vector(other or zero(b, elem, 0), lanes)).ref
    name = memory_suffix(elem, lanes)
    if is_contiguous(pointer, elem):
        args = (("ptr", pointer.ref), (f"<{lanes} x i1>", flags), (kind, filler))
        ref = masked_call(b, kind, f"llvm.masked.load.{name}.p0", f"i32 {align}", args)
    else:
        args = ((f"<{lanes} x ptr>", b.vector(pointer, lanes)), (f"<{lanes} x i1>", flags), (kind, filler))
        ref = masked_call(b, kind, f"llvm.masked.gather.{name}.v{lanes}p0", f"i32 {align}", args)
    return from_storage(b, ref, elem, lanes)


def masked_call(b: Builder, result: str, function: str, align: str, args: tuple[tuple[str, str], ...]) -> str:
    """llvm.masked.*: the alignment is the argument before the mask."""
    *front, mask = args[:-1] if result != "void" else args
    ordered = [*front, ("i32", align.split()[1]), mask, *(args[-1:] if result != "void" else ())]
    return b.call(result, function, *ordered)


def memory_suffix(elem: str, lanes: int) -> str:
    scalar = {"f16": "f16", "bf16": "i16", "i1": "i8"}.get(elem)
    return f"v{lanes}{scalar}" if scalar else suffix(elem, lanes)


def zero(b: Builder, elem: str, lanes: int) -> Val:
    ref = "null" if elem == "ptr" else "0" if elem[0] == "i" and elem != "i1" else "0.0"
    return b.as_vector(Val(elem, "false" if elem == "i1" else ref), lanes)


def _read_one(b: Builder, pointer: Val, elem: str, mask: Val | None, other: Val | None) -> Val:
    kind, align = stored(elem, 0), BYTES[elem]
    if mask is None:
        return from_storage(b, b.op(f"load {kind}, ptr {pointer.ref}, align {align}"), elem, 0)
    start = b.label
    otherwise = other or zero(b, elem, 0)
    if otherwise.lanes or otherwise.step:
        lanes = otherwise.lanes or 1
        raise AssertionError(f"a uniform load with {lanes} others")
    then, done = b.labels("then", "endif")
    with b.region():
        b.emit(f"br i1 {mask.ref}, label %{then}, label %{done}")
        b.place(then)
        value = from_storage(b, b.op(f"load {kind}, ptr {pointer.ref}, align {align}"), elem, 0)
        last = b.label
        b.branch(done)
    b.place(done)
    joined = b.op(f"phi {register(elem)} [ {otherwise.ref}, %{start} ], [ {value.ref}, %{last} ]")
    return Val(elem, joined)


def write(b: Builder, pointer: Val, value: Val, elem: str, lanes: int, mask: Val | None = None) -> None:
    """Store for every lane whose mask is true; of lanes with one address the last wins."""
    if mask is not None and mask.ref == "true":
        mask = None
    if mask is not None and mask.ref == "false":
        return
    align = BYTES[elem]
    if not lanes:
        with b.when(mask.ref if mask is not None else "true"):
            b.emit(f"store {stored(elem, 0)} {to_storage(b, value).ref}, ptr {pointer.ref}, align {align}")
        return
    kind = stored(elem, lanes)
    data = to_storage(b, b.as_vector(value, lanes)).ref
    if is_contiguous(pointer, elem) and mask is None:
        b.emit(f"store {kind} {data}, ptr {pointer.ref}, align {align}")
        return
    flags = b.vector(mask if mask is not None else integer(1, "i1"), lanes)
    name = memory_suffix(elem, lanes)
    if is_contiguous(pointer, elem):
        flags = _opaque(b, flags, lanes) if BYTES[elem] < 4 or elem == "i32" else flags
        where, function = ("ptr", pointer.ref), f"llvm.masked.store.{name}.p0"
    else:
        where, function = (f"<{lanes} x ptr>", b.vector(pointer, lanes)), f"llvm.masked.scatter.{name}.v{lanes}p0"
    masked_call(b, "void", function, f"i32 {align}", ((kind, data), where, (f"<{lanes} x i1>", flags)))


def _opaque(b: Builder, flags: str, lanes: int) -> str:
    """The same mask, hidden from LLVM.

    LLVM 22 turns a store of truncated lanes, under a constant mask of one lane, into a store of the lane before it was
    truncated, which writes past the element.
    """
    bits = f"i{lanes}"
    wide = b.op(f"zext {bits} {b.op(f'bitcast <{lanes} x i1> {flags} to {bits}')} to i32")
    hidden = b.op(f'call i32 asm "", "=r,0"(i32 {wide})')
    return b.op(f"bitcast {bits} {b.op(f'trunc i32 {hidden} to {bits}')} to <{lanes} x i1>")


def _buffer_pointer(f: Frame, buffer: Buffer, index: Index, lanes: int) -> Val:
    b = f.b
    turn = -1 if buffer.turned else 1
    place = flat(b, index[::turn], buffer.shape[::turn], lanes)
    size = BYTES[buffer.stored]
    if place.lanes:
        offset = b.op(f"sext {register(place.elem, lanes)} {place.ref} to <{lanes} x i64>")
        scaled = b.op(f"mul <{lanes} x i64> {offset}, {b.splat(str(size), 'i64', lanes)}")
        return Val("ptr", b.op(f"getelementptr i8, ptr {buffer.ref}, <{lanes} x i64> {scaled}"), lanes)
    distance = b.mul(b.widen(place.ref, place.elem), str(size), "i64")
    ref = buffer.ref if distance == "0" else b.op(f"getelementptr i8, ptr {buffer.ref}, i64 {distance}")
    return Val("ptr", ref, step=b.mul(place.step, str(size), "i64") if place.step else "")


def read_buffer(f: Frame, buffer: Buffer, index: Index, lanes: int) -> Val:
    pointer = _buffer_pointer(f, buffer, index, lanes)
    found = read(f.b, pointer, buffer.stored, 0 if pointer.is_uniform else lanes)
    return Val(buffer.elem, found.ref, found.lanes)


def write_buffer(f: Frame, buffer: Buffer, index: Index, value: Val, lanes: int) -> None:
    b = f.b
    plain = Val(buffer.stored, b.as_vector(value, lanes).ref, lanes)
    write(b, _buffer_pointer(f, buffer, index, lanes), plain, buffer.stored, lanes)


def load(f: Frame, op: Op, index: Index, lanes: int) -> Val:
    """A load at an index of its tile, or a scalar load with index () and lanes 0."""
    elem = op.results[0].type.elem
    mask = f.at(op.operands[1], index, lanes) if has_mask(op) else None
    other = f.at(op.operands[2], index, lanes) if len(op.operands) > 2 else None
    if mask is not None and mask.ref == "false":
        return other or zero(f.b, elem, 0)
    pointer = f.at(op.operands[0], index, lanes)
    if pointer.is_uniform and mask is not None and mask.is_uniform and other is not None and not other.is_uniform:
        pointer = f.b.as_vector(pointer, lanes)
    if pointer.is_uniform and (mask is None or mask.is_uniform):
        lanes = 0
    f.b.cost += f.b.weight * BYTE_COST * BYTES[elem] * max(1, lanes)
    return read(f.b, pointer, elem, lanes, mask, other)


def whole(value: Value) -> Place:
    return tuple(range(len(value.type.shape)))


def store(f: Frame, op: Op) -> None:
    pointer, value, *rest = op.operands
    elem = pointer.type.pointee
    mask = rest[0] if rest else None
    if not pointer.type.is_tile:
        write(f.b, f.scalar(pointer), f.scalar(value), elem, 0, f.scalar(mask) if mask else None)
        return
    roots = [(v, whole(v)) for v in op.operands]
    masks = [(mask, whole(mask))] if mask else []
    terms = mask_terms(f, roots, masks)
    own = mask_terms(f, [], masks)

    def body(index: Index, lanes: int) -> None:
        flag = f.at(mask, index, lanes) if mask else None
        if flag is not None and flag.is_uniform and lanes:
            with f.b.when(flag.ref), f.scope():
                write(f.b, f.at(pointer, index, lanes), f.at(value, index, lanes), elem, lanes)
            return
        write(f.b, f.at(pointer, index, lanes), f.at(value, index, lanes), elem, lanes, flag)

    axis = pick_axis(f, pointer.type.shape, roots, pointer)
    with f.scope():
        nest(f, pointer.type.shape, axis, terms, body, dead=own)


RMW = {1: "and", 2: "or", 3: "xor", 4: "add", 5: "fadd", 6: "max", 7: "min", 8: "umax", 9: "umin", 10: "xchg"}


def atomic(f: Frame, op: Op) -> None:
    """Read-modify-write or compare-and-swap, lane after lane; sequentially consistent whatever the kernel asks."""
    pointer, result = op.operands[0], op.results[0]
    elem = pointer.type.pointee
    if elem in ("f16", "bf16", "i1") or (op.name == "tt.atomic_cas" and elem in ("f32", "f64")):
        raise UnsupportedError.of(op, f"atomics on {elem} are not; use fp32 or an integer")
    if not pointer.type.is_tile:
        f.env[result] = _atomic_one(f, op, [f.scalar(o) for o in op.operands], elem)
        return
    buffer = f.buffer(result.type)

    def each(index: Index) -> None:
        found = _atomic_one(f, op, [f.at(o, index, 0) for o in op.operands], elem)
        write_buffer(f, buffer, index, found, 0)

    with f.scope():
        every_index(f, pointer.type.shape, each)
    f.buffers[result] = buffer


def every_index(f: Frame, shape: tuple[int, ...], each: object) -> None:
    """Call `each` with every index of the shape, in row-major order."""

    def inner(index: Index) -> None:
        if len(index) == len(shape):
            each(index)  # type: ignore[operator]
            return
        with f.loop("0", str(shape[len(index)]), 1) as at:
            inner((*index, at))

    inner(())


def _atomic_one(f: Frame, op: Op, operands: list[Val], elem: str) -> Val:
    b, kind = f.b, register(elem)
    pointer = operands[0].ref
    if op.name == "tt.atomic_cas":
        pair = b.op(f"cmpxchg ptr {pointer}, {kind} {operands[1].ref}, {kind} {operands[2].ref} seq_cst seq_cst")
        return Val(elem, b.op(f"extractvalue {{ {kind}, i1 }} {pair}, 0"))
    code = RMW.get(op.attrs["atomic_rmw_op"])
    if code is None:
        raise UnsupportedError.of(op, "this read-modify-write is not known")
    slot = b.slot(elem)
    b.put(zero(b, elem, 0), slot)
    with b.when(operands[2].ref if len(operands) > 2 else "true"):
        b.put(Val(elem, b.op(f"atomicrmw {code} ptr {pointer}, {kind} {operands[1].ref} seq_cst")), slot)
    return b.get(slot, elem)
