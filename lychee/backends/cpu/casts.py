"""Casts among number types, and between registers and memory."""

from __future__ import annotations

from collections.abc import Callable

from .llvm import FLOATS, Builder, Val, integer, register, suffix
from .ttir import Op

CASTS = {
    "arith.sitofp": "sitofp",
    "arith.uitofp": "uitofp",
    "arith.extsi": "sext",
    "arith.extui": "zext",
    "arith.trunci": "trunc",
}


def round_to(b: Builder, value: Val, elem: str) -> Val:
    """An fp32 register rounded to the nearest value of `elem`, still as fp32."""
    if elem not in ("f16", "bf16"):
        return Val(elem, value.ref, value.lanes)
    lanes, kind = value.lanes, register("f32", value.lanes)
    if elem == "f16":
        half = b.half(lanes)
        return Val(elem, b.op(f"fpext {half} {b.op(f'fptrunc {kind} {value.ref} to {half}')} to {kind}"), lanes)
    bits = b.op(f"bitcast {kind} {value.ref} to {register('i32', lanes)}")
    return Val(elem, b.op(f"bitcast {register('i32', lanes)} {_bf16_bits(b, value, bits)} to {kind}"), lanes)


def _bf16_bits(b: Builder, value: Val, bits: str) -> str:
    """The fp32 bits with the lower half rounded away, to nearest even; NaN stays NaN."""
    lanes = value.lanes
    kind = register("i32", lanes)
    constant: Callable[[int], str] = lambda c: b.vector(integer(c), lanes)  # noqa: E731
    odd = b.op(f"and {kind} {b.op(f'lshr {kind} {bits}, {constant(16)}')}, {constant(1)}")
    up = b.op(f"add {kind} {bits}, {b.op(f'add {kind} {odd}, {constant(0x7FFF)}')}")
    nan = b.op(f"fcmp uno {register('f32', lanes)} {value.ref}, {value.ref}")
    quiet = b.op(f"or {kind} {bits}, {constant(0x400000)}")
    condition = register("i1", lanes)
    chosen = b.op(f"select {condition} {nan}, {kind} {quiet}, {kind} {up}")
    return b.op(f"and {kind} {chosen}, {constant(-0x10000)}")


def cast(b: Builder, op: Op, v: list[Val], elem: str, lanes: int) -> Val:
    source = register(v[0].elem, lanes)
    ref = b.op(f"{CASTS[op.name]} {source} {v[0].ref} to {register(elem, lanes)}")
    return round_to(b, Val(elem if elem not in FLOATS or elem == "f64" else "f32", ref, lanes), elem)


def extf(b: Builder, op: Op, v: list[Val], elem: str, lanes: int) -> Val:
    if elem != "f64":
        return Val(elem, v[0].ref, v[0].lanes)
    return Val(elem, b.op(f"fpext {register('f32', lanes)} {v[0].ref} to {register('f64', lanes)}"), lanes)


def truncf(b: Builder, op: Op, v: list[Val], elem: str, lanes: int) -> Val:
    value = v[0]
    if value.elem == "f64":
        value = _narrow(b, value, to_odd=elem != "f32")
    return round_to(b, Val("f32", value.ref, lanes), elem)


def _narrow(b: Builder, value: Val, to_odd: bool) -> Val:
    """fp64 to fp32; to odd if it will be rounded once more, so that rounding twice is rounding once."""
    lanes, wide, kind = value.lanes, register("f64", value.lanes), register("f32", value.lanes)
    near = b.op(f"fptrunc {wide} {value.ref} to {kind}")
    if not to_odd:
        return Val("f32", near, lanes)
    back, flags, word = b.op(f"fpext {kind} {near} to {wide}"), register("i1", lanes), register("i32", lanes)
    size = f"llvm.fabs.{suffix('f64', lanes)}"
    above = b.op(f"fcmp ogt {wide} {b.call(wide, size, (wide, back))}, {b.call(wide, size, (wide, value.ref))}")
    inexact = b.op(f"fcmp one {wide} {back}, {value.ref}")
    bits = b.op(f"bitcast {kind} {near} to {word}")
    down = b.op(f"sub {word} {bits}, {b.op(f'zext {flags} {above} to {word}')}")
    odd = b.op(f"or {word} {down}, {b.op(f'zext {flags} {inexact} to {word}')}")
    return Val("f32", b.op(f"bitcast {word} {odd} to {kind}"), lanes)


def to_integer(b: Builder, op: Op, v: list[Val], elem: str, lanes: int) -> Val:
    """Saturates, as a GPU does; NaN gives 0."""
    source, target = register(v[0].elem, lanes), register(elem, lanes)
    sign = "s" if op.name == "arith.fptosi" else "u"
    wide = "f64" if v[0].elem == "f64" else "f32"
    function = f"llvm.fpto{sign}i.sat.{suffix(elem, lanes)}.{suffix(wide, lanes)}"
    return Val(elem, b.call(target, function, (source, v[0].ref)), lanes)


def bitcast(b: Builder, op: Op, v: list[Val], elem: str, lanes: int) -> Val:
    """Between types of one width; 16-bit floats change width on the way."""
    value = v[0]
    if elem == value.elem or (elem == "ptr" and value.elem == "ptr"):
        return Val(elem, value.ref, value.lanes)
    bits = value.ref
    if value.elem in ("f16", "bf16"):
        bits = to_storage(b, value).ref
        if value.elem == "f16":
            half = b.half(lanes)
            bits = b.op(f"bitcast {half} {bits} to {register('i16', lanes)}")
        value = Val("i16", bits, lanes)
    if elem == "f16":
        half = b.half(lanes)
        return from_storage(b, b.op(f"bitcast {register(value.elem, lanes)} {bits} to {half}"), elem, lanes)
    if elem == "bf16":
        return from_storage(b, bits, elem, lanes)
    if elem == value.elem:
        return value
    return Val(elem, b.op(f"bitcast {register(value.elem, lanes)} {bits} to {register(elem, lanes)}"), lanes)


def pointer_cast(b: Builder, op: Op, v: list[Val], elem: str, lanes: int) -> Val:
    word = "inttoptr" if elem == "ptr" else "ptrtoint"
    return Val(elem, b.op(f"{word} {register(v[0].elem, lanes)} {v[0].ref} to {register(elem, lanes)}"), lanes)


def to_storage(b: Builder, value: Val) -> Val:
    """A register as it lies in memory; `elem` stays, the LLVM type is STORED's."""
    lanes = value.lanes
    of: Callable[[str], str] = lambda t: f"<{lanes} x {t}>" if lanes else t  # noqa: E731
    if value.elem == "f16":
        return Val("f16", b.op(f"fptrunc {of('float')} {value.ref} to {b.half(lanes)}"), lanes)
    if value.elem == "bf16":
        bits = b.op(f"bitcast {of('float')} {value.ref} to {of('i32')}")
        high = b.op(f"lshr {of('i32')} {bits}, {b.vector(integer(16), lanes)}")
        return Val("bf16", b.op(f"trunc {of('i32')} {high} to {of('i16')}"), lanes)
    if value.elem == "i1":
        return Val("i1", b.op(f"zext {of('i1')} {value.ref} to {of('i8')}"), lanes)
    return value


def from_storage(b: Builder, ref: str, elem: str, lanes: int) -> Val:
    """The register of what was loaded."""
    of: Callable[[str], str] = lambda t: f"<{lanes} x {t}>" if lanes else t  # noqa: E731
    if elem == "f16":
        return Val("f16", b.op(f"fpext {b.half(lanes)} {ref} to {of('float')}"), lanes)
    if elem == "bf16":
        wide = b.op(f"zext {of('i16')} {ref} to {of('i32')}")
        high = b.op(f"shl {of('i32')} {wide}, {b.vector(integer(16), lanes)}")
        return Val("bf16", b.op(f"bitcast {of('i32')} {high} to {of('float')}"), lanes)
    if elem == "i1":
        return Val("i1", b.op(f"icmp ne {of('i8')} {ref}, {b.vector(integer(0, 'i8'), lanes)}"), lanes)
    return Val(elem, ref, lanes)
