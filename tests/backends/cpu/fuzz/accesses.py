"""Lines that touch memory: where a tile's lanes lie in a buffer, which of them are masked off, what is done there."""

from __future__ import annotations

from dataclasses import dataclass

from tests.backends.cpu.fuzz.builder import Builder, Memory, Shape, Value, size_of
from tests.backends.cpu.fuzz.kinds import F32, I1, I8, I16, I32, I64, U8, U32, U64

ATOMIC_KINDS = (I32, I64, U32, U64)


@dataclass(frozen=True)
class Places:
    """The text of an int32 tile of element offsets from a program's base, and the ends of its range (both inside)."""

    text: str
    low: int
    high: int


def offsets(g: Builder, shape: Shape) -> str:
    """Row-major lane numbers, written as kernels write them."""
    terms = []
    for axis, dim in enumerate(shape):
        index = ", ".join(":" if a == axis else "None" for a in range(len(shape)))
        lanes = f"tl.arange(0, {dim})" + (f"[{index}]" if len(shape) > 1 else "")
        step = size_of(shape[axis + 1 :])
        terms.append(lanes if step == 1 else f"{lanes} * {step}")
    return g.assign(" + ".join(terms), "at")


def column_major(g: Builder, shape: Shape) -> str:
    terms = []
    for axis, dim in enumerate(shape):
        index = ", ".join(":" if a == axis else "None" for a in range(len(shape)))
        terms.append(f"tl.arange(0, {dim})[{index}] * {size_of(shape[:axis])}")
    return g.assign(" + ".join(terms), "at")


def injective(g: Builder, shape: Shape, room: int) -> Places:
    """Every lane at a place of its own."""
    size = size_of(shape)
    options = ["rows", "rows", "shifted", "columns", "reversed", "xor", "strided", "padded", "odd"]
    option = g.choose(options)
    if not shape:
        place = g.scalar_integer(room)
        return Places(place, 0, room - 1)
    if option == "columns" and len(shape) > 1:
        return Places(column_major(g, shape), 0, size - 1)
    at = offsets(g, shape)
    if option == "shifted":
        shift = g.scalar_integer(min(16, room))
        return Places(f"({at} + {shift})", 0, size - 1 + min(16, room) - 1)
    if option == "reversed":
        return Places(f"({size - 1} - {at})", 0, size - 1)
    if option == "xor":
        return Places(f"({at} ^ {g.integer(0, size - 1)})", 0, size - 1)
    if option == "strided":
        return Places(f"({at} * 2)", 0, 2 * size - 2)
    if option == "padded" and len(shape) == 2:
        pitch = shape[1] + g.integer(1, 3)
        text = f"tl.arange(0, {shape[0]})[:, None] * {pitch} + tl.arange(0, {shape[1]})[None, :]"
        return Places(g.assign(text, "at"), 0, (shape[0] - 1) * pitch + shape[1] - 1)
    if option == "odd" and size <= room:
        text = f"(({at} * {2 * g.integer(0, 7) + 1} + {g.integer(0, 9)}) & {room - 1})"
        return Places(text, 0, room - 1)
    return Places(at, 0, size - 1)


def anywhere(g: Builder, shape: Shape, room: int) -> Places:
    """For loads: also places that several lanes share, neighbours, and places that data says."""
    option = g.choose(["own", "own", "gather", "neighbour", "axis", "divided", "modulo", "wide"])
    if option == "own" or not shape:
        return injective(g, shape, room)
    if option in ("gather", "wide"):
        index = g.integers(shape, I64 if option == "wide" else I32)
        return Places(f"({index.text} & {room - 1})", 0, room - 1)
    if option == "axis" and len(shape) > 1:
        axis = g.integer(0, len(shape) - 1)
        index = ", ".join(":" if a == axis else "None" for a in range(len(shape)))
        lanes = f"tl.arange(0, {shape[axis]})[{index}]"
        return Places(f"tl.broadcast_to({lanes} * 3, {shape})", 0, 3 * shape[axis])
    at = offsets(g, shape)
    size = size_of(shape)
    if option == "neighbour":
        shift = g.choose([-1, 1, -3, 7])
        return Places(f"({at} + {shift})", shift, size - 1 + shift)
    if option == "divided":
        return Places(f"({at} // {g.choose([2, 3, 4])})", 0, size - 1)
    if option == "modulo":
        return Places(f"({at} % {g.choose([3, 5, 8])})", 0, 7)
    return Places(at, 0, size - 1)


def masked(g: Builder, memory: Memory, places: Places, shape: Shape, base: str, *, always: bool = False) -> str:
    """The text of a mask ("" for none): what memory safety asks for, and sometimes more."""
    conditions = []
    if places.low < 0:
        conditions.append(f"({places.text} >= 0)")
    if places.high >= memory.room:
        conditions.append(f"({places.text} < {memory.room})")
    if memory.limit:
        conditions.append(f"({base} + {places.text} < {memory.limit})")
    if always or g.chance(4):
        conditions.append(_extra(g, places, shape))
    return " & ".join(conditions)


def _extra(g: Builder, places: Places, shape: Shape) -> str:
    option = g.choose(["ends", "ends", "data", "holes", "uniform", "axes", "narrow", "far", "square", "lone"])
    if option == "data" or not shape:
        return g.condition(shape).text
    if option == "uniform":
        number = g.scalar_integer(8)
        return f"({'pid' if number.isdigit() else number} > {g.integer(0, 6)})"
    if option == "axes" and len(shape) == 2:
        rows, columns = (comparison(g, f"tl.arange(0, {d})", d) for d in shape)
        return f"({rows}[:, None] & {columns}[None, :])"
    if option == "narrow":  # lane numbers that wrap around: no prefix
        kind = g.choose([I8, I16, U8])
        step = g.integer(1, 9) * (300 if kind == I16 else 1)
        return f"({places.text}.to(tl.{kind.triton}) * {step} {g.choose('<>')} {g.integer(0, 99)})"
    if option == "far":
        number = g.constant((), I32).text
        return f"({places.text} + {number} {g.choose(['<', '>='])} {g.integer(0, 99)})"
    if option == "holes":
        return f"({places.text} % {g.integer(2, 4)} != {g.integer(0, 1)})"
    if option == "square" and len(shape) == 2 and shape[0] == shape[1]:  # one comparison along both axes
        lanes = g.assign(comparison(g, f"tl.arange(0, {shape[0]})", shape[0]), "m")
        return f"({lanes}[:, None] & {lanes}[None, :])"
    if option == "lone":
        return f"({places.text} {g.choose(['!=', '=='])} {g.integer(0, size_of(shape))})"
    return comparison(g, places.text, size_of(shape))


def comparison(g: Builder, lanes: str, size: int) -> str:
    """Lane numbers against an end, mostly one near the lanes' own."""
    end = g.scalar_integer(32) if g.chance(4) else str(g.choose([size, size - 1, 1, 0, size // 2, size - 2]))
    return g.choose(
        ["({lanes} < {end})", "({end} > {lanes})", "({lanes} <= {end})", "({end} >= {lanes})"] * 2
        + ["({lanes} >= {end})", "({end} < {lanes})"]
    ).format(lanes=lanes, end=end)


def load(g: Builder) -> None:
    """A tile or scalar; lanes behind a false mask are given a value, by `other` or by a `where` around the load."""
    memory = g.choose(g.memories)
    shape = g.choose([g.base, g.base, *[v.shape for v in g.scope[-4:]]])
    places = anywhere(g, shape, memory.room)
    base = memory.base
    if not memory.writable and g.chance(2):
        base = g.choose(["0", f"((pid + 1) % {memory.programs}) * {memory.room}"])
        base = "0" if memory.limit else base
    mask = masked(g, memory, places, shape, base)
    pointer = f"{memory.name} + {base} + {places.text}"
    g.define(loaded(g, memory, pointer, mask, shape))


def loaded(g: Builder, memory: Memory, pointer: str, mask: str, shape: Shape) -> Value:
    kind = memory.kind
    grain, error = (0.0, kind.slack) if memory.rounded else (kind.grain, 0.0)
    if not mask:
        return Value(f"tl.load({pointer})", shape, kind, kind.bound, grain, error)
    other = g.exact_like(shape, kind) if g.chance(3) else g.constant(() if g.chance(5) else shape, kind)
    if other.shape == () and shape:
        other = g.literal(kind) if not kind.is_bool else g.constant(shape, kind)
    bound = max(kind.bound, other.bound)
    grain = min(grain, other.grain) if kind.is_float else 0.0
    if g.chance(3):
        mask = g.assign(mask, "m")
        text = f"tl.where({mask}, tl.load({pointer}, mask={mask}), {other.text})"
        if other.text.lstrip("-").replace(".", "").isdigit():
            text = f"tl.load({pointer}, mask={mask}, other={other.text})"
    else:
        text = f"tl.load({pointer}, mask={mask}, other={other.text})"
    return Value(text, shape, kind, bound, grain, error)


def store(g: Builder, value: Value | None = None) -> None:
    """Into memory that this program owns, each lane to a place of its own."""
    value = value or g.any_tile()
    memories = [m for m in g.memories if m.writable and m.room >= size_of(value.shape)]
    memories = [m for m in memories if value.exact or m.rounded]
    if not memories:
        return
    memory = g.choose(memories)
    out = g.cast(value, memory.kind)
    if memory.kind.is_float:
        out_fit = g.fit(out, memory.kind, memory.rounded)
        if out_fit is None:
            return
        out = out_fit
    g.used.add(value.text)
    places = injective(g, value.shape, memory.room)
    mask = masked(g, memory, places, value.shape, memory.base)
    g.emit(f"tl.store({memory.name} + {memory.base} + {places.text}, {out.text}{f', mask={mask}' if mask else ''})")


def update(g: Builder) -> None:
    """Loads, changes and stores at the same or at other places: in-place work through one or two names of a buffer."""
    memory = g.choose([m for m in g.memories if m.writable])
    partner = g.choose([m for m in g.memories if m.buffer == memory.buffer and m.kind == memory.kind])
    places = anywhere(g, g.base, partner.room)
    mask = masked(g, partner, places, g.base, partner.base)
    value = g.define(loaded(g, partner, f"{partner.name} + {partner.base} + {places.text}", mask, g.base))
    if g.chance(5):
        store(g)
    store(g, value)


def atomic(g: Builder) -> None:
    """A read-modify-write in memory that the program owns, lanes at places of their own, its old values used or not."""
    memories = [m for m in g.memories if m.writable and m.kind in ATOMIC_KINDS]
    memories = [m for m in memories if m.room >= size_of(g.base)]
    if not memories:
        return
    memory = g.choose(memories)
    kind = memory.kind
    shape = () if g.chance(3) else g.base
    value = g.like(shape, kind)
    places = injective(g, shape, memory.room)
    mask = masked(g, memory, places, shape, memory.base)
    name = g.choose(["add", "max", "min", "and", "or", "xor", "xchg", "cas"])
    pointer = f"{memory.name} + {memory.base} + {places.text}"
    if name == "cas":
        if mask:
            return
        text = f"tl.atomic_cas({pointer}, {g.like(shape, kind).text}, {value.text})"
    else:
        text = f"tl.atomic_{name}({pointer}, {value.text}{f', mask={mask}' if mask else ''})"
    if mask or g.chance(5):
        g.emit(text)
    else:
        g.define(Value(text, shape, kind))


def count(g: Builder) -> None:
    """Atomics of all programs and several lanes on shared places, by operations whose order does not matter."""
    memory = next((m for m in g.memories if m.name == "shared"), None)
    if memory is None:
        return
    index = g.integers(g.base)
    if memory.kind.is_float:
        value = Value(f"(({index.text} & 7) - 3).to(tl.float32)", g.base, F32)
        name = g.choose(["add", "max", "min"])
    else:
        value = g.like(g.base, memory.kind)
        name = g.choose(["add", "max", "min", "and", "or", "xor"])
    mask = f", mask={g.condition(g.base).text}" if g.chance(5) else ""
    g.emit(f"tl.atomic_{name}(shared + ({g.integers(g.base).text} & {memory.room - 1}), {value.text}{mask})")


def condition_scalar(g: Builder) -> str:
    """The text of a scalar condition that data, arguments or the program's number decide."""
    option = g.choose(["pid", "argument", "data", "loaded"])
    if option == "pid":
        return f"pid % 2 == {g.integer(0, 1)}"
    if option == "data":
        value = g.find(lambda v: v.shape == () and v.kind == I1)
        if value is not None:
            return value.text
    if option == "loaded":
        memories = [m for m in g.memories if m.kind.is_int and not m.limit]
        if memories:
            memory = g.choose(memories)
            return f"tl.load({memory.name} + {memory.base} + {g.integer(0, memory.room - 1)}) > 0"
    return f"{g.scalar_integer(8)} < {g.integer(0, 7)}"
