"""Elementwise ops on values of any form: scalars stay scalar, affine indices stay affine, the rest are vectors."""

from __future__ import annotations

from collections.abc import Callable

from . import casts, vecmath
from .errors import UnsupportedError
from .llvm import BYTES, FLOATS, Builder, Val, floating, integer, literal, register, suffix
from .ttir import Op

INTEGER = {
    "arith.addi": "add",
    "arith.subi": "sub",
    "arith.muli": "mul",
    "arith.andi": "and",
    "arith.ori": "or",
    "arith.xori": "xor",
    "arith.shli": "shl",
    "arith.shrsi": "ashr",
    "arith.shrui": "lshr",
}
DIVISION = {"arith.divsi": "sdiv", "arith.remsi": "srem", "arith.divui": "udiv", "arith.remui": "urem"}
FLOAT = {"arith.addf": "fadd", "arith.subf": "fsub", "arith.mulf": "fmul", "arith.divf": "fdiv", "arith.remf": "frem"}
FLOAT["tt.precise_divf"] = "fdiv"
MINMAX = {
    "arith.maxnumf": "maxnum",
    "arith.minnumf": "minnum",
    "arith.maximumf": "maximum",
    "arith.minimumf": "minimum",
    "arith.maxsi": "smax",
    "arith.minsi": "smin",
    "arith.maxui": "umax",
    "arith.minui": "umin",
}
INTRINSIC = {
    "math.sqrt": "sqrt",
    "tt.precise_sqrt": "sqrt",
    "math.absf": "fabs",
    "math.floor": "floor",
    "math.ceil": "ceil",
    "math.trunc": "trunc",
    "math.roundeven": "roundeven",
    "math.fma": "fma",
}
VECMATH = {f"math.{n}": n for n in ("exp", "exp2", "log", "log2", "log1p", "sin", "cos", "erf", "tanh", "rsqrt")}
CMPI = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")
CMPF = (
    "false",
    "oeq",
    "ogt",
    "oge",
    "olt",
    "ole",
    "one",
    "ord",
    "ueq",
    "ugt",
    "uge",
    "ult",
    "ule",
    "une",
    "uno",
    "true",
)


def apply(b: Builder, op: Op, operands: list[Val], lanes: int) -> Val:
    """The result of an elementwise op for `lanes` lanes; uniform or affine if its operands allow."""
    name, elem = op.name, op.results[0].type.elem
    if name == "arith.constant":
        value = op.attrs["value"]
        return floating(float(value), elem) if elem in FLOATS else integer(int(value), elem)
    if name in INTEGER and (affine := _affine(b, name, operands, elem)):
        return affine
    if name in ("arith.extsi", "arith.trunci") and (affine := _affine_cast(b, name, operands[0], elem, lanes)):
        return affine
    if name in ("arith.andi", "arith.ori") and elem == "i1" and (known := _logic(name, operands)):
        return known
    if name == "arith.select" and operands[0].ref in ("true", "false"):
        return operands[1 if operands[0].ref == "true" else 2]
    if name == "tt.addptr":
        return _addptr(b, op, operands, lanes)
    if all(v.is_uniform for v in operands):
        lanes = 0
    vectors = [b.as_vector(v, lanes) for v in operands]
    handler = _handler(name)
    if handler is None:
        raise UnsupportedError.of(
            op, "write it with ops that are (arithmetic, comparison, select, cast, exp, log, sqrt, ...)"
        )
    return handler(b, op, vectors, elem, lanes)


def _affine(b: Builder, name: str, operands: list[Val], elem: str) -> Val | None:
    """Sums and multiples of indices, and literals folded."""
    x, y = operands
    if x.lanes or y.lanes or elem == "i1":
        return None
    if name in ("arith.addi", "arith.subi"):
        combine = b.add if name == "arith.addi" else b.sub
        step = combine(x.step or "0", y.step or "0", elem) if x.step or y.step else ""
        return Val(elem, combine(x.ref, y.ref, elem), step="" if step == "0" else step)
    if name == "arith.shli" and y.literal is not None and 0 <= y.literal < 8 * BYTES[elem]:
        name, y = "arith.muli", integer(1 << y.literal, elem)
    if name == "arith.muli" and not (x.step and y.step):
        index, factor = (x, y) if x.step else (y, x)
        step = b.mul(index.step, factor.ref, elem) if index.step else ""
        return Val(elem, b.mul(index.ref, factor.ref, elem), step="" if step == "0" else step)
    return None


def _affine_cast(b: Builder, name: str, value: Val, elem: str, lanes: int) -> Val | None:
    if value.lanes or value.elem == "i1" or elem == "i1":
        return None
    known = value.literal
    if value.is_uniform and known is not None:
        return integer(known, elem)
    step = literal(value.step) if value.step else 0
    # A constant step whose lanes span little keeps its form: see lanes.py on wrapping.
    if (
        name == "arith.extsi"
        and step is not None
        and (value.is_uniform or abs(step) * lanes < 1 << 8 * BYTES[value.elem] - 2)
    ):
        ref = b.widen(value.ref, value.elem, elem)
        return Val(elem, ref, step=value.step)
    return None


def _addptr(b: Builder, op: Op, operands: list[Val], lanes: int) -> Val:
    """Pointer plus elements. Offsets may be of any integer width and are signed."""
    pointer, offset = operands
    size = BYTES[op.results[0].type.pointee]
    if not pointer.lanes and not offset.lanes:
        base, steps = pointer.ref, [pointer.step or "0"]
        distance = b.widen(offset.ref, offset.elem)
        if distance != "0":
            base = b.op(f"getelementptr i8, ptr {base}, i64 {b.mul(distance, str(size), 'i64')}")
        if offset.step:
            steps.append(b.mul(b.widen(offset.step, offset.elem), str(size), "i64"))
        step = b.add(steps[0], steps[-1], "i64") if len(steps) > 1 else steps[0]
        return Val("ptr", base, step="" if step == "0" else step)
    where = b.vector(offset, lanes)
    if offset.elem != "i64":
        where = b.op(f"sext {register(offset.elem, lanes)} {where} to <{lanes} x i64>")
    scaled = b.op(f"mul <{lanes} x i64> {where}, {b.splat(str(size), 'i64', lanes)}") if size > 1 else where
    if pointer.is_uniform:
        return Val("ptr", b.op(f"getelementptr i8, ptr {pointer.ref}, <{lanes} x i64> {scaled}"), lanes)
    base = b.vector(pointer, lanes)
    return Val("ptr", b.op(f"getelementptr i8, <{lanes} x ptr> {base}, <{lanes} x i64> {scaled}"), lanes)


Handler = Callable[[Builder, Op, list[Val], str, int], Val]


def _handler(name: str) -> Handler | None:
    if name in INTEGER:
        return _integer
    if name in DIVISION:
        return _division
    if name in FLOAT:
        return _float
    if name in MINMAX:
        return _minmax
    if name in INTRINSIC or name in VECMATH:
        return _math
    if name in casts.CASTS:
        return casts.cast
    return OTHERS.get(name)


def supports(name: str) -> bool:
    return name in ("arith.constant", "tt.addptr") or _handler(name) is not None


def _logic(name: str, operands: list[Val]) -> Val | None:
    """`and` and `or` with a known boolean."""
    for known, other in (operands, operands[::-1]):
        if known.ref in ("true", "false"):
            absorbing = "false" if name == "arith.andi" else "true"
            return known if known.ref == absorbing else other
    return None


def _integer(b: Builder, op: Op, v: list[Val], elem: str, lanes: int) -> Val:
    kind = register(elem, lanes)
    return Val(elem, b.op(f"{INTEGER[op.name]} {kind} {v[0].ref}, {v[1].ref}"), lanes)


def _division(b: Builder, op: Op, v: list[Val], elem: str, lanes: int) -> Val:
    """Division never traps: by zero it gives what division by one would; INT_MIN / -1 wraps."""
    what, kind, flags = DIVISION[op.name], register(elem, lanes), register("i1", lanes)
    divisor = v[1].ref
    signed = what[0] == "s"
    if lanes and elem in ("i8", "i16", "i32") and literal(divisor) is None:
        return _divide_in_double(b, v, elem, lanes, what)
    if literal(divisor) in (None, 0, -1):
        bad = b.op(f"icmp eq {kind} {divisor}, {b.vector(integer(0, elem), lanes)}")
        if signed:
            lowest = b.vector(integer(1 << 8 * BYTES[elem] - 1, elem), lanes)
            low = b.op(f"icmp eq {kind} {v[0].ref}, {lowest}")
            minus = b.op(f"icmp eq {kind} {divisor}, {b.vector(integer(-1, elem), lanes)}")
            bad = b.op(f"or {flags} {bad}, {b.op(f'and {flags} {low}, {minus}')}")
        divisor = b.op(f"select {flags} {bad}, {kind} {b.vector(integer(1, elem), lanes)}, {kind} {divisor}")
    return Val(elem, b.op(f"{what} {kind} {v[0].ref}, {divisor}"), lanes)


def _divide_in_double(b: Builder, v: list[Val], elem: str, lanes: int, what: str) -> Val:
    """No vector unit divides integers; the quotient of two 32-bit integers is exact in fp64 once truncated."""
    kind, wide, flags = register(elem, lanes), f"<{lanes} x double>", register("i1", lanes)
    zero = b.op(f"icmp eq {kind} {v[1].ref}, {b.vector(integer(0, elem), lanes)}")
    divisor = b.op(f"select {flags} {zero}, {kind} {b.vector(integer(1, elem), lanes)}, {kind} {v[1].ref}")
    sign = what[0]
    x, y = (b.op(f"{'si' if sign == 's' else 'ui'}tofp {kind} {r} to {wide}") for r in (v[0].ref, divisor))
    ratio = b.op(f"fdiv {wide} {x}, {y}")
    long = f"<{lanes} x i64>"
    quotient = b.op(f"trunc {long} {b.op(f'fptosi {wide} {ratio} to {long}')} to {kind}")
    if what.endswith("div"):
        return Val(elem, quotient, lanes)
    return Val(elem, b.op(f"sub {kind} {v[0].ref}, {b.op(f'mul {kind} {quotient}, {divisor}')}"), lanes)


def _float(b: Builder, op: Op, v: list[Val], elem: str, lanes: int) -> Val:
    ref = b.op(f"{FLOAT[op.name]} {register(elem, lanes)} {v[0].ref}, {v[1].ref}")
    return casts.round_to(b, Val("f64" if elem == "f64" else "f32", ref, lanes), elem)


def _minmax(b: Builder, op: Op, v: list[Val], elem: str, lanes: int) -> Val:
    kind = register(elem, lanes)
    function = f"llvm.{MINMAX[op.name]}.{suffix(elem, lanes)}"
    return Val(elem, b.call(kind, function, (kind, v[0].ref), (kind, v[1].ref)), lanes)


def _math(b: Builder, op: Op, v: list[Val], elem: str, lanes: int) -> Val:
    kind, wide = register(elem, lanes), "f64" if elem == "f64" else "f32"
    args = [(kind, x.ref) for x in v]
    if op.name in INTRINSIC:
        ref = b.call(kind, f"llvm.{INTRINSIC[op.name]}.{suffix(elem, lanes)}", *args)
    else:
        made = vecmath.definition(VECMATH[op.name], max(1, lanes), wide, avx512=b.target.lanes >= 16)
        b.functions[made.symbol] = made.text
        b.declares.update(made.declares)
        ref = b.op(f"call {kind} {made.symbol}({', '.join(f'{t} {r}' for t, r in args)})")
    return casts.round_to(b, Val(wide, ref, lanes), elem)


def _compare(b: Builder, op: Op, v: list[Val], elem: str, lanes: int) -> Val:
    code = op.attrs["predicate"]
    kind, known = register(v[0].elem, lanes), [x.literal for x in v]
    if op.name == "arith.cmpf":
        return Val("i1", b.op(f"fcmp {CMPF[code]} {kind} {v[0].ref}, {v[1].ref}"), lanes)
    if known[0] is not None and known[1] is not None and (folded := _folded(CMPI[code], known[0], known[1])):
        return Val("i1", folded)
    return Val("i1", b.op(f"icmp {CMPI[code]} {kind} {v[0].ref}, {v[1].ref}"), lanes)


def _folded(predicate: str, x: int, y: int) -> str:
    if predicate[0] == "u" and (x < 0 or y < 0):
        return ""
    kind = predicate if predicate in ("eq", "ne") else predicate[1:]
    true = {"eq": x == y, "ne": x != y, "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y}[kind]
    return "true" if true else "false"


def _select(b: Builder, op: Op, v: list[Val], elem: str, lanes: int) -> Val:
    kind = register(elem, lanes)
    return Val(elem, b.op(f"select {register('i1', lanes)} {v[0].ref}, {kind} {v[1].ref}, {kind} {v[2].ref}"), lanes)


def _negate(b: Builder, op: Op, v: list[Val], elem: str, lanes: int) -> Val:
    return Val(elem, b.op(f"fneg {register(elem, lanes)} {v[0].ref}"), lanes)


def _high_product(b: Builder, op: Op, v: list[Val], elem: str, lanes: int) -> Val:
    """The upper half of the unsigned product."""
    bits = 8 * BYTES[elem]
    double = f"<{lanes} x i{2 * bits}>" if lanes else f"i{2 * bits}"
    kind = register(elem, lanes)
    x, y = (b.op(f"zext {kind} {u.ref} to {double}") for u in v)
    shift = "<" + ", ".join([f"i{2 * bits} {bits}"] * lanes) + ">" if lanes else str(bits)
    product = b.op(f"mul {double} {x}, {y}")
    return Val(elem, b.op(f"trunc {double} {b.op(f'lshr {double} {product}, {shift}')} to {kind}"), lanes)


def _clamp(b: Builder, op: Op, v: list[Val], elem: str, lanes: int) -> Val:
    """min(max(x, low), high), NaN as propagateNan (0xFFFF: all) says."""
    kind = register(elem, lanes)
    nan = op.attrs.get("propagateNan", 0) not in (0,)
    names = ("maximum", "minimum") if nan else ("maxnum", "minnum")
    up = b.call(kind, f"llvm.{names[0]}.{suffix(elem, lanes)}", (kind, v[0].ref), (kind, v[1].ref))
    return Val(elem, b.call(kind, f"llvm.{names[1]}.{suffix(elem, lanes)}", (kind, up), (kind, v[2].ref)), lanes)


def _absolute(b: Builder, op: Op, v: list[Val], elem: str, lanes: int) -> Val:
    kind = register(elem, lanes)
    return Val(elem, b.call(kind, f"llvm.abs.{suffix(elem, lanes)}", (kind, v[0].ref), ("i1", "false")), lanes)


OTHERS: dict[str, Handler] = {
    "arith.extf": casts.extf,
    "arith.truncf": casts.truncf,
    "tt.fp_to_fp": casts.truncf,
    "arith.fptosi": casts.to_integer,
    "arith.fptoui": casts.to_integer,
    "arith.cmpi": _compare,
    "arith.cmpf": _compare,
    "arith.select": _select,
    "arith.negf": _negate,
    "math.absi": _absolute,
    "tt.mulhiui": _high_product,
    "tt.bitcast": casts.bitcast,
    "arith.bitcast": casts.bitcast,
    "tt.int_to_ptr": casts.pointer_cast,
    "tt.ptr_to_int": casts.pointer_cast,
    "tt.clampf": _clamp,
}
