"""Lines of arithmetic: each function defines one value from values in scope."""

from __future__ import annotations

from tests.backends.cpu.fuzz.builder import Builder, Value
from tests.backends.cpu.fuzz.kinds import F32, I1, I32, Kind

SMOOTH = {  # text, largest magnitude of the result, largest slope
    "tl.exp(-tl.abs({x}))": (1.0, 1.0),
    "tl.exp2(-tl.abs({x}))": (1.0, 1.0),
    "tl.log(1.0 + tl.abs({x}))": (12.0, 1.0),
    "tl.log2(1.0 + tl.abs({x}))": (18.0, 1.5),
    "tl.sqrt(tl.abs({x}))": (512.0, 1.0),
    "tl.rsqrt(1.0 + tl.abs({x}))": (1.0, 1.0),
    "tl.sin({x})": (1.0, 1.0),
    "tl.cos({x})": (1.0, 1.0),
    "tl.sigmoid({x})": (1.0, 1.0),
    "tl.erf({x})": (1.0, 1.2),
    "({x} / (1.0 + tl.abs({x})))": (1.0, 1.0),
}


def arithmetic(g: Builder) -> None:
    """A binary operation on two values of one kind."""
    first = g.any_tile()
    kind = first.kind
    if kind.is_bool:
        second = g.like(first.shape, kind)
        operation = g.choose("&|^")
        g.define(Value(f"({first.text} {operation} {second.text})", first.shape, kind))
    elif kind.is_int:
        _integer(g, first)
    else:
        _float(g, first)


def _second(g: Builder, first: Value) -> Value:
    if g.chance(2):
        return g.literal(first.kind)
    return g.like(first.shape, first.kind)


def _integer(g: Builder, first: Value) -> None:
    kind = first.kind
    operation = g.choose(["+", "-", "*", "&", "|", "^", "//", "%", "<<", ">>", "tl.minimum", "tl.maximum"])
    if operation in ("//", "%"):
        text = f"({first.text} {operation} {_divisor(g, first)})"
    elif operation in ("<<", ">>"):
        if g.chance(5):
            amount = str(g.integer(0, kind.bits - 1))
        else:
            amount = f"({g.like(first.shape, kind).text} & {kind.bits - 1})"
        text = f"({first.text} {operation} {amount})"
    elif operation.startswith("tl."):
        text = f"{operation}({first.text}, {g.like(first.shape, kind).text})"
    else:
        text = f"({first.text} {operation} {_second(g, first).text})"
    g.define(Value(text, first.shape, kind))


def _divisor(g: Builder, first: Value) -> str:
    """Positive: division by zero, and of the lowest number by -1, have no answer."""
    if g.chance(5):
        return str(g.choose([1, 2, 3, 7, 8, 100]))
    return f"(({g.like(first.shape, first.kind).text} & 7) + 1)"


def _float(g: Builder, first: Value) -> None:
    """Falls back to a maximum where a product would no longer be exact in its kind."""
    kind = first.kind
    operation = g.choose(["+", "-", "*", "min", "max", "fma"])
    second = _second(g, first) if operation in "+-*" else g.like(first.shape, kind)
    grain = min(first.grain, second.grain)
    error = first.error + second.error
    text, bound = f"({first.text} {operation} {second.text})", first.bound + second.bound
    if operation in ("*", "fma"):
        bound, grain = first.bound * second.bound, first.grain * second.grain
        error = first.bound * second.error + second.bound * first.error + first.error * second.error
        if operation == "fma":
            third = g.like(first.shape, kind)
            bound, grain, error = bound + third.bound, min(grain, third.grain), error + third.error
            text = f"tl.fma({first.text}, {second.text}, {third.text})"
    rounded = not kind.exact(bound, grain)
    if operation in ("min", "max") or bound > 1000 or (rounded and (first.exact and second.exact)):
        second = g.like(first.shape, kind)
        text = f"tl.{'minimum' if operation == 'min' else 'maximum'}({first.text}, {second.text})"
        text = f"{text}.to(tl.bfloat16)" if kind.triton == "bfloat16" else text
        bound = max(first.bound, second.bound)
        grain, error = min(first.grain, second.grain), max(first.error, second.error)
        rounded = grain == 0
    g.define(Value(text, first.shape, kind, bound, 0.0 if rounded else grain, _grown(error, bound, kind, rounded)))


def _grown(error: float, bound: float, kind: Kind, rounded: bool) -> float:
    return error + bound * kind.epsilon if rounded else 0.0


def unary(g: Builder) -> None:
    value = g.any_tile()
    kind = value.kind
    if kind.is_bool:
        g.define(Value(f"({value.text} == 0)", value.shape, kind))
    elif kind.is_int:
        options = ["(-{x})", "(~{x})", "tl.abs({x})"] if kind.signed else ["(0 - {x})", "({x} ^ 85)"]
        x = f"({value.text} >> 1)" if kind.signed else value.text
        g.define(Value(g.choose(options).format(x=x), value.shape, kind))
    else:
        options = ["(-{x})", "tl.abs({x})"]
        if kind == F32 and value.exact:
            options += ["tl.floor({x})", "tl.ceil({x})"]
        text = g.choose(options).format(x=value.text)
        grain = 1.0 if "floor" in text or "ceil" in text else value.grain
        bound = value.bound + (1.0 if grain != value.grain else 0.0)
        g.define(Value(text, value.shape, kind, bound, grain, value.error))


def smooth(g: Builder) -> None:
    """An elementary function; its result is rounded, so it only flows on to where that is allowed."""
    value = g.cast(g.any_tile(), F32)
    if value.bound > 60000:
        return
    text, (bound, slope) = g.choose(list(SMOOTH.items()))
    error = slope * value.error + bound * 1e-6 + (value.bound * 1e-7)
    x = value.text
    if text.count("{x}") > 1 and not x.isidentifier():
        x = g.assign(x)
    g.define(Value(text.format(x=x), value.shape, F32, min(bound, max(1.0, value.bound)), 0.0, error))


def compare(g: Builder) -> None:
    first = g.any_tile()
    if first.kind.is_bool or not first.exact:
        first = g.exact_like(first.shape, g.choose([I32, F32]))
    if g.chance(3):
        second = g.literal(first.kind)
    else:
        second = g.exact_like(first.shape, first.kind)
    operation = g.choose(["<", "<=", ">", ">=", "==", "!="])
    g.define(Value(f"({first.text} {operation} {second.text})", first.shape, I1))


def select(g: Builder) -> None:
    first = g.any_tile()
    second = g.like(first.shape, first.kind)
    condition = g.condition(first.shape)
    text = f"tl.where({condition.text}, {first.text}, {second.text})"
    g.define(_either(first, second, text))


def _either(first: Value, second: Value, text: str) -> Value:
    bound, grain = max(first.bound, second.bound), min(first.grain, second.grain)
    return Value(text, first.shape, first.kind, bound, grain, max(first.error, second.error))


def convert(g: Builder) -> None:
    value = g.any_tile()
    g.define(g.cast(value, g.some_kind()))


def bitcast(g: Builder) -> None:
    """Between signed and unsigned, and of sums of bits to wider types."""
    value = g.find(lambda v: v.kind.is_int)
    if value is None:
        return
    from tests.backends.cpu.fuzz.kinds import INTS

    other = next(k for k in INTS if k.bits == value.kind.bits and k.signed != value.kind.signed)
    g.define(Value(f"{value.text}.to(tl.{other.triton}, bitcast=True)", value.shape, other))


def high_product(g: Builder) -> None:
    value = g.find(lambda v: v.kind.is_int and v.kind.bits >= 32)
    if value is None:
        return
    from tests.backends.cpu.fuzz.kinds import U32, U64

    kind = U32 if value.kind.bits == 32 else U64
    first = g.define(g.cast(value, kind))
    second = g.like(value.shape, kind)
    g.define(Value(f"tl.umulhi({first.text}, {second.text})", value.shape, kind))


def helper_call(g: Builder) -> None:
    """A call of one of the functions that `control.PRELUDE` defines."""
    first = g.any_tile()
    if first.kind.is_bool or not first.kind.is_int:
        first = g.exact_like(first.shape, I32)
    second = g.like(first.shape, first.kind)
    choice = g.integer(0, 2)
    if choice == 0:
        high, low = g.name(), g.name()
        g.emit(f"{high}, {low} = ordered({first.text}, {second.text})")
        g.scope += [Value(high, first.shape, first.kind), Value(low, first.shape, first.kind)]
    elif choice == 1:
        g.define(Value(f"mixed({first.text}, {second.text}, {g.integer(0, 2)})", first.shape, first.kind))
    else:
        g.define(Value(f"powered({first.text}, {g.integer(0, 3)})", first.shape, first.kind))
