"""Loops, branches and whole programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import strategies as st

from tests.backends.cpu.fuzz import accesses, products, tiles, values
from tests.backends.cpu.fuzz.builder import Builder, Memory, Value, size_of
from tests.backends.cpu.fuzz.kinds import F32, FLOATS, I1, I32, I64, INTS, Kind
from tests.backends.cpu.fuzz.program import Buffer, Pointer, Program

PRELUDE = """
import triton
import triton.language as tl


@triton.jit
def ordered(a, b):
    return tl.maximum(a, b), tl.minimum(a, b)


@triton.jit
def mixed(a, b, HOW: tl.constexpr):
    if HOW == 0:
        return a ^ b
    out = a + b
    if HOW == 1:
        out = out - (a & b)
    return out


@triton.jit
def powered(a, TIMES: tl.constexpr):
    out = a
    for _ in tl.static_range(TIMES):
        out = out * a
    return out


@triton.jit
def chained(a, b):
    return a + b + 3


@triton.jit
def affine(a, b, c, d):
    return a * c, b * c + d


@triton.jit
def best(value_a, index_a, value_b, index_b):
    first = (value_a > value_b) | ((value_a == value_b) & (index_a <= index_b))
    return tl.where(first, value_a, value_b), tl.where(first, index_a, index_b)


"""

Line = Callable[[Builder], None]
SIMPLE: tuple[tuple[int, Line], ...] = (
    (8, values.arithmetic),
    (3, accesses.load),
    (2, accesses.store),
    (2, accesses.update),
    (2, values.compare),
    (2, values.select),
    (2, values.convert),
    (2, values.unary),
    (4, tiles.reduce),
    (4, products.product),
    (2, values.smooth),
    (1, values.bitcast),
    (1, values.high_product),
    (1, values.helper_call),
    (2, tiles.expand),
    (2, tiles.transpose),
    (2, tiles.reshape),
    (2, tiles.join_or_split),
    (2, tiles.flip_or_sort),
    (2, tiles.scan),
    (3, accesses.atomic),
    (2, accesses.count),
)
LINES = tuple(line for weight, line in SIMPLE for _ in range(weight))
BASES = (
    (1,),
    (2,),
    (8,),
    (16,),
    (32,),
    (64,),
    (2, 4),
    (8, 8),
    (16, 2),
    (1, 16),
    (32, 1),
    (4, 32),
    (16, 16),
    (2, 4, 8),
    (128,),
    (256,),
    (32, 32),
    (4, 64),
)


def statement(g: Builder) -> None:
    structured = g.integer(0, 19)
    if g.depth < 3 and structured >= 15:
        g.choose(STRUCTURES)(g)
    else:
        g.choose(LINES)(g)


def mutables(g: Builder) -> list[Value]:
    """Fresh variables for a block to change: defined before it, in scope as long as what surrounds it."""
    made = []
    for _ in range(g.integer(0, 3)):
        twin = made[-1] if made and g.chance(4) else None  # for `swap`
        kind = twin.kind if twin else g.choose((F32, I32, I1, *FLOATS[1:], *INTS[1:]))
        shape = twin.shape if twin else g.choose([g.base, g.base, (), g.any_tile().shape])
        start = g.like(shape, kind)
        rounded = kind.is_float and not start.exact
        fitted = g.fit(start, kind, rounded)
        if fitted is None:
            continue
        error = kind.slack if rounded else 0.0
        value = replace(fitted, text=g.assign(renewed(fitted), "c"), bound=kind.bound, error=error, mutable=True)
        g.scope.append(value)
        made.append(value)
    return made


def change(g: Builder) -> None:
    """Assigns to a mutable variable in scope, keeping it to its kind's bound and grain."""
    target = g.find(lambda v: v.mutable)
    if target is None:
        return
    kind = target.kind
    value = g.like(target.shape, kind)
    if not target.exact:
        value = replace(value, text=f"tl.maximum({target.text}, {value.text})", error=max(target.error, value.error))
        if kind.triton == "bfloat16":
            value = replace(value, text=f"{value.text}.to(tl.bfloat16)")
        if value.error <= target.error and value.bound <= target.bound:
            g.emit(f"{target.text} = {value.text}")
        return
    if not value.exact:
        return
    how = g.choose(["replace", "add", "select", "moved"])
    if how == "add" and kind.is_float and not kind.exact(value.bound + target.bound, min(value.grain, kind.grain)):
        how = "replace"
    text, grain, bound = value.text, value.grain, value.bound
    if how == "moved":
        g.emit(f"{target.text} = {moved(g, target)}")
        return
    if how == "add" and not kind.is_bool:
        text, bound = f"({target.text} + {value.text})", bound + target.bound
    elif how == "select":
        text, bound = f"tl.where({g.condition(target.shape).text}, {value.text}, {target.text})", max(bound, kind.bound)
    fitted = g.fit(replace(value, text=text, bound=bound, grain=min(grain, kind.grain)), kind, False)
    assert fitted is not None
    g.emit(f"{target.text} = {renewed(fitted)}")


def moved(g: Builder, value: Value) -> str:
    """The text of a tile's own elements in other places, so that it cannot be changed while it is read."""
    size, text = size_of(value.shape), value.text
    if len(value.shape) == 2 and value.shape[0] == value.shape[1] and g.chance(5):
        return f"tl.trans({text})"
    if size < 4:
        return renewed(value)
    halves = (size // 2, 2) if g.chance(5) else (2, size // 2)
    return f"tl.reshape(tl.trans(tl.reshape({text}, {halves})), {value.shape})"


def swap(g: Builder) -> None:
    """Exchanges two mutable variables."""
    first = g.find(lambda v: v.mutable)
    if first is None:
        return
    second = g.find(lambda v: v.mutable and (v.shape, v.kind, v.exact) == (first.shape, first.kind, first.exact))
    assert second is not None
    if first.text == second.text:
        return
    name = g.assign(renewed(first), "t")
    g.emit(f"{first.text} = {moved(g, second) if g.chance(3) else renewed(second)}")
    g.emit(f"{second.text} = {name}")


def renewed(value: Value) -> str:
    """The value's text, never a bare name: Triton's front end takes two names of one tensor for one variable."""
    if not value.text.isidentifier():
        return value.text
    return (
        f"({value.text} | {value.text})"
        if value.kind.is_bool
        else f"({value.text} * {'1.0' if value.kind.is_float else '1'})"
    )


def body(g: Builder) -> None:
    for _ in range(g.integer(1, 3)):
        statement(g)
        change(g)
    if g.chance(2):
        swap(g)


def branch(g: Builder) -> None:
    mutables(g)
    condition = accesses.condition_scalar(g)
    with g.block(f"if {condition}:"):
        body(g)
    if g.chance(5):
        with g.block("else:"):
            body(g)


def trips(g: Builder) -> str:
    """The text of a number of passes, at most 3: constant, an argument, or data."""
    option = g.choose(["constant", "argument", "data"])
    if option == "argument":
        return "n3"
    if option == "data":
        return g.scalar_integer(4)
    return str(g.integer(0, 3))


def counted_loop(g: Builder) -> None:
    mutables(g)
    name = g.name("k")
    end = trips(g)
    ranges = [f"range({end})", f"range(1, {end})", f"range(0, {end}, 2)"]
    if end.isdigit():
        ranges.append(f"tl.static_range({end})")
    with g.block(f"for {name} in {g.choose(ranges)}:", repeats=3):
        g.define(Value(f"tl.full((), 0, tl.int32) + {name}", (), I32))
        body(g)


def while_loop(g: Builder) -> None:
    mutables(g)
    counter = g.assign("tl.full((), 0, tl.int32)", "w")
    condition = f"{counter} < {trips(g)}"
    if g.chance(5):
        value = g.find(lambda v: v.mutable and v.shape != () and v.exact and not v.kind.is_bool)
        if value is not None:
            high = f"tl.max({value.text}.to(tl.float32), axis=None)" if value.kind.is_float else ""
            high = high or f"tl.max({value.text}, axis=None)"
            condition = f"({condition}) & ({high} > {g.integer(0, 3)})"
    with g.block(f"while {condition}:", repeats=3):
        g.scope.append(Value(counter, (), I32))
        body(g)
        g.emit(f"{counter} += 1")


def pointer_loop(g: Builder) -> None:
    """Pointers carried from pass to pass, as matrix kernels do."""
    memory = g.choose(g.memories)
    step = g.choose([1, 2, size_of(g.base), memory.room // 4])
    if memory.name == "shared" or size_of(g.base) + 3 * step > memory.room or not g.base:
        return
    mutables(g)
    places = accesses.offsets(g, g.base)
    pointer = g.assign(f"{memory.name} + {memory.base} + {places}", "p")
    at = g.assign("tl.full((), 0, tl.int32)", "o")
    with g.block(f"for {g.name('k')} in range({trips(g)}):", repeats=3):
        where = accesses.Places(f"({places} + {at})", 0, size_of(g.base) - 1 + 2 * step)
        mask = accesses.masked(g, memory, where, g.base, memory.base)
        value = g.define(accesses.loaded(g, memory, pointer, mask, g.base))
        body(g)
        if memory.writable and g.chance(5):
            out = g.fit(value, memory.kind, memory.rounded)
            if out is not None:
                g.emit(f"tl.store({pointer}, {out.text}{f', mask={mask}' if mask else ''})")
        g.emit(f"{pointer} += {step}")
        g.emit(f"{at} += {step}")


def product_loop(g: Builder) -> None:
    products.product_loop(g, statement)


STRUCTURES: tuple[Line, ...] = (
    branch,
    counted_loop,
    pointer_loop,
    while_loop,
    product_loop,
    counted_loop,
    products.attention_loop,
)


def memory(g: Builder, number: int, kind: Kind, writable: bool, rounded: bool, programs: int) -> None:
    """A buffer and the argument that points to it; writable ones may get a second, overlapping argument."""
    room = max(16, size_of(g.base) * g.choose([1, 2, 4]))
    room = max(room, g.choose([16, 64, 512]))
    shift = g.choose([0, 1, room // 2]) if writable and g.chance(4) else -1
    territory = room + max(shift, 0)
    cut = g.integer(1, room - 1) if shift < 0 and g.chance(5) else 0
    size = programs * territory - cut
    tolerance = kind.slack if rounded else 0.0
    g.buffers.append(Buffer(kind.name, size, g.integer(0, 10**6), g.chance(3), tolerance))
    limit = ""
    if cut:
        limit = f"size{number}"
        if g.chance(3):
            g.constants.append((limit, size))
        else:
            g.arguments.append((limit, size))
    base = f"pid * {territory}"
    g.arguments.append((f"x{number}", Pointer(number)))
    made = Memory(f"x{number}", number, kind, room, base, limit, writable, programs, rounded)
    g.memories.append(made)
    if shift >= 0:
        g.arguments.append((f"y{number}", Pointer(number, shift)))
        g.memories.append(replace(made, name=f"y{number}"))


@st.composite
def programs(draw: Callable[[st.SearchStrategy], object]) -> Program:
    g = Builder(draw)
    g.base = g.choose(BASES)
    grid = g.choose([(1, 1, 1), (3, 1, 1), (2, 2, 1), (1, 2, 2)])
    count = grid[0] * grid[1] * grid[2]
    for number in range(g.integer(2, 4)):
        kind = g.choose((F32, I32, *FLOATS[1:], *INTS[1:], I1))
        memory(g, number, kind, number == 0 or g.chance(5), False, count)
    if g.chance(4):
        memory(g, len(g.buffers), g.choose(FLOATS), True, True, count)
    if g.chance(3):
        kind = g.choose((I32, I64, F32))
        g.arguments.append(("shared", Pointer(len(g.buffers))))
        g.memories.append(Memory("shared", len(g.buffers), kind, 8, "0", "", False, 1))
        g.buffers.append(Buffer(kind.name, 8, 1))
    header(g)
    readable = list(g.memories)
    g.memories = [m for m in readable if m.name != "shared"]
    accesses.load(g)
    g.memories = readable
    for _ in range(g.integer(1, 10)):
        statement(g)
        if g.chance(2):
            mutables(g)
    finish(g)
    names = ", ".join([n for n, _ in g.arguments] + [f"{n}: tl.constexpr" for n, _ in g.constants])
    source = PRELUDE + f"@triton.jit\ndef kernel({names}):\n" + "\n".join(g.lines) + "\n"
    return Program(source, tuple(g.buffers), tuple(v for _, v in g.arguments), tuple(g.constants), grid)


def header(g: Builder) -> None:
    """The program's number, scalars every line may use, and lane numbers to compute with."""
    g.emit("pid = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))")
    g.scope.append(Value("pid", (), I32))
    g.arguments.append(("n3", g.integer(0, 3)))
    for name, kind in (("s0", I32), ("s1", I64)):
        if g.chance(5):
            low, high = kind.literal_range()
            g.arguments.append((name, g.choose([0, 1, 16, -1, 5, low, high])))
            g.define(Value(f"tl.full((), {name}, tl.{kind.triton})", (), kind))
    if g.chance(4):
        number = g.integer(-8, 8) * 0.5
        g.arguments.append(("f0", number))
        g.define(Value("tl.full((), f0, tl.float32)", (), F32, abs(number), 0.5))
    if g.chance(2):
        g.emit("tl.assume(n3 >= 0)")
    if g.chance(5):
        g.scope.append(Value(accesses.offsets(g, g.base), g.base, I32))
    if g.chance(3):
        kind = g.choose(INTS)
        axis = g.integer(0, len(g.base) - 1)
        lanes = f"tl.arange(0, {g.base[axis]}).to(tl.{kind.triton}) * {g.integer(-3, 90) if kind.signed else 5}"
        g.define(Value(lanes, (g.base[axis],), kind))


def finish(g: Builder) -> None:
    """Stores what nothing has used, so that little of a program is dead."""
    unused = [v for v in g.scope if v.text not in g.used and v.text.isidentifier()]
    for value in unused[-5:]:
        accesses.store(g, value)
