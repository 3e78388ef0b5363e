"""Lines that change a tile's shape: views, reductions, scans."""

from __future__ import annotations

from tests.backends.cpu.fuzz.builder import LARGEST, SLOWEST, Builder, Shape, Value, size_of
from tests.backends.cpu.fuzz.kinds import BF16, F32, I32, U32, Kind


def expand(g: Builder) -> None:
    """Adds an axis, or spreads a value to the program's base shape."""
    value = g.any_tile()
    if len(value.shape) == len(g.base) - 1 and value.shape:
        axes = [a for a in range(len(g.base)) if value.shape == g.base[:a] + g.base[a + 1 :]]
        if axes:
            axis = g.choose(axes)
            index = ", ".join("None" if a == axis else ":" for a in range(len(g.base)))
            shape = (*g.base[:axis], 1, *g.base[axis + 1 :])
            g.define(same(value, f"{value.text}[{index}]", shape))
    elif value.shape != g.base:
        g.define(g.like(g.base, value.kind))


def transpose(g: Builder) -> None:
    value = g.find(lambda v: len(v.shape) > 1)
    if value is None:
        return
    if len(value.shape) == 2:
        text = f"tl.trans({value.text})" if g.chance(5) else f"{value.text}.T"
        g.define(same(value, text, value.shape[::-1]))
    else:
        order = g.choose([(0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
        shape = tuple(value.shape[a] for a in order)
        g.define(same(value, f"tl.permute({value.text}, {order})", shape))


def reshape(g: Builder) -> None:
    value = g.find(lambda v: v.shape != ())
    if value is None:
        return
    size = size_of(value.shape)
    options: list[Shape] = [(size,), g.base] if size == size_of(g.base) else [(size,)]
    options += [(d, size // d) for d in (1, 2, 4, 16) if size % d == 0]
    options += [(2, size // 4, 2)] if size >= 4 else []
    shape = g.choose(options)
    g.define(same(value, f"tl.reshape({value.text}, {shape})", shape))


def join_or_split(g: Builder) -> None:
    value = g.find(lambda v: len(v.shape) > 1 and v.shape[-1] == 2)
    if value is not None and g.chance(7):
        left, right = g.name(), g.name()
        g.emit(f"{left}, {right} = tl.split({value.text})")
        for name in (left, right):
            g.scope.append(same(value, name, value.shape[:-1]))
        return
    first = g.find(lambda v: v.shape != () and 2 * size_of(v.shape) <= LARGEST and len(v.shape) < 3)
    if first is None:
        return
    second = g.like(first.shape, first.kind)
    if g.chance(5):
        text, shape = f"tl.join({first.text}, {second.text})", (*first.shape, 2)
    else:
        text, shape = f"tl.interleave({first.text}, {second.text})", (*first.shape[:-1], 2 * first.shape[-1])
    bound, error = max(first.bound, second.bound), max(first.error, second.error)
    g.define(Value(text, shape, first.kind, bound, min(first.grain, second.grain), error))


def flip_or_sort(g: Builder) -> None:
    value = g.find(lambda v: v.shape != () and not v.kind.is_bool and v.exact and size_of(v.shape) <= SLOWEST)
    if value is None or value.kind == BF16 or g.repeats > 2:
        return
    last = len(value.shape) - 1
    if value.shape[last] < 2 or value.kind.is_float:
        return
    if g.chance(5):
        g.define(same(value, f"tl.sort({value.text}, descending={g.chance(5)})", value.shape))
    else:
        g.define(same(value, f"tl.flip({value.text}, {last})", value.shape))


def reduce(g: Builder) -> None:
    """Along an axis or over everything, keeping the axis or not."""
    value = g.find(lambda v: v.shape != ())
    if value is None:
        return
    kind = value.kind
    if kind.is_bool:
        value, kind = g.define(g.cast(value, I32)), I32
    names = ["sum", "max", "min"] if kind.is_float else ["sum", "max", "min", "xor_sum"]
    slow = size_of(value.shape) <= SLOWEST and g.repeats <= 4
    indexed = ["argmax", "argmin"] if value.exact else []
    custom = ["chained", "best"] if slow and kind.is_int else []
    if not slow:
        names = [n for n in names if n != "xor_sum"]
    name = g.choose([*names, *indexed, *custom])
    axis = g.integer(0, len(value.shape) - 1)
    everything = name in ("sum", "max", "min") and g.chance(2)
    keep = not everything and name not in ("chained", "best") and g.chance(2)
    length = size_of(value.shape) if everything else value.shape[axis]
    shape: Shape = () if everything else value.shape[:axis] + value.shape[axis + 1 :]
    if keep:
        shape = (*value.shape[:axis], 1, *value.shape[axis + 1 :])
    where = "axis=None" if everything else f"axis={axis}"
    where += ", keep_dims=True" if keep else ""
    if name in ("argmax", "argmin"):
        g.define(Value(f"tl.{name}({value.text}, {where})", shape, I32))
    elif name == "chained":
        g.define(Value(f"tl.reduce({value.text}, {axis}, chained)", shape, kind))
    elif name == "best":
        other = g.like(value.shape, I32)
        first, second = g.name(), g.name()
        g.emit(f"{first}, {second} = tl.reduce(({value.text}, {other.text}), {axis}, best)")
        g.scope += [Value(first, shape, kind), Value(second, shape, I32)]
    elif kind.is_float:
        _reduce_float(g, value, name, where, shape, length)
    else:
        g.define(
            Value(f"tl.{name}({value.text}, {where})", shape, _summed(kind) if name == "sum" else _widened(name, kind))
        )


def _reduce_float(g: Builder, value: Value, name: str, where: str, shape: Shape, length: int) -> None:
    """Halves are summed as float32, where their sums are exact; `tl.max` and `tl.min` make float32 of them anyway."""
    kind, text = F32, value.text
    if name == "sum":
        text = text if value.kind == F32 else f"{text}.to(tl.float32)"
        bound, error = value.bound * length, (value.error + value.bound * length * F32.epsilon) * length
        grain = value.grain if kind.exact(bound, value.grain) else 0.0
        g.define(Value(f"tl.sum({text}, {where})", shape, kind, bound, grain, 0.0 if grain else error))
    else:
        g.define(Value(f"tl.{name}({text}, {where})", shape, kind, value.bound, value.grain, value.error))


def _summed(kind: Kind) -> Kind:
    """What `tl.sum` and `tl.cumsum` accumulate in."""
    return kind if kind.bits >= 32 else I32 if kind.signed else U32


def _widened(name: str, kind: Kind) -> Kind:
    """`tl.max` and `tl.min` widen short integers to 32 bits."""
    return I32 if name in ("max", "min") and kind.bits < 32 else kind


def scan(g: Builder) -> None:
    """Prefix sums and products, and scans with combines of their own, forwards and backwards."""
    value = g.find(lambda v: v.shape != () and size_of(v.shape) <= SLOWEST)
    if value is None or g.repeats > 4:
        return
    kind = value.kind
    if kind.is_bool:
        value, kind = g.define(g.cast(value, I32)), I32
    axis = g.integer(0, len(value.shape) - 1)
    reverse = f", reverse={g.chance(3)}"
    if kind.is_float:
        value = g.define(g.cast(value, F32))
        length = value.shape[axis]
        bound, error = value.bound * length, (value.error + value.bound * length * F32.epsilon) * length
        grain = value.grain if F32.exact(bound, value.grain) else 0.0
        text = f"tl.cumsum({value.text}, {axis}{reverse})"
        g.define(Value(text, value.shape, F32, bound, grain, 0.0 if grain else error))
        return
    name = g.choose(["cumsum", "cumprod", "chained", "affine"])
    if name == "affine":
        other = g.like(value.shape, kind)
        first, second = g.name(), g.name()
        pair = f"({value.text}, {other.text})"
        g.emit(f"{first}, {second} = tl.associative_scan({pair}, {axis}, affine{reverse})")
        g.scope += [Value(first, value.shape, kind), Value(second, value.shape, kind)]
    elif name == "chained":
        g.define(Value(f"tl.associative_scan({value.text}, {axis}, chained{reverse})", value.shape, kind))
    else:
        out = _summed(kind) if name == "cumsum" else kind
        g.define(Value(f"tl.{name}({value.text}, {axis}{reverse})", value.shape, out))


def same(value: Value, text: str, shape: Shape) -> Value:
    """Other text and shape, and all else as it was."""
    return Value(text, shape, value.kind, value.bound, value.grain, value.error)
