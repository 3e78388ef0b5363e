"""Matrix products: of tiles in scope, and in loops over memory as matrix kernels write them."""

from __future__ import annotations

from collections.abc import Callable

from tests.backends.cpu.fuzz.accesses import store
from tests.backends.cpu.fuzz.builder import LARGEST, Builder, Memory, Value
from tests.backends.cpu.fuzz.kinds import BF16, F16, F32, I1, I8, I32, Kind
from tests.backends.cpu.fuzz.tiles import same

OPERANDS = (F32, F16, BF16, I8)


def product(g: Builder) -> None:
    """`tl.dot` of two-dimensional tiles, with and without an accumulator."""
    first = g.find(lambda v: len(v.shape) == 2 and (v.kind in (F32, F16, BF16, I8)) and v.exact and v.bound <= 64)
    if first is None:
        return
    kind = first.kind
    rows, inner = first.shape
    columns = g.choose([d for d in (1, 2, 4, 8, 16, 32) if rows * d <= LARGEST and inner * d <= LARGEST])
    if g.chance(3):
        second, columns = same(first, f"tl.trans({first.text})", (inner, rows)), rows
    else:
        second = g.exact_like((inner, columns), kind)
    if rows * columns > LARGEST or rows * inner * columns > 16384:
        return
    shape = (rows, columns)
    out = I32 if kind == I8 else F32
    bound, grain = first.bound * second.bound * inner, first.grain * second.grain
    arguments = f"{first.text}, {second.text}"
    if g.chance(4):
        total = g.exact_like(shape, out)
        arguments += f", {total.text}"
        bound, grain = bound + total.bound, min(grain, total.grain)
    if kind == I8:
        g.define(Value(f"tl.dot({arguments}, out_dtype=tl.int32)", shape, I32))
    elif F32.exact(bound, grain):
        g.define(Value(f'tl.dot({arguments}, input_precision="ieee")', shape, F32, bound, grain))


def product_loop(g: Builder, meanwhile: Callable[[Builder], None]) -> None:
    """A loop over K with operands from memory: pointers carried or computed, masks or none, the sum carried.

    `meanwhile` writes a line that may look at the sum on the way.
    """
    memories = [m for m in g.memories if m.kind in OPERANDS and m.name != "shared"]
    if not memories:
        return
    left = g.choose(memories)
    right = g.choose([m for m in memories if m.kind == left.kind])
    kind = left.kind
    rows, columns, depth = (g.choose([1, 2, 4, 8, 16]), g.choose([1, 2, 8, 16, 32]), g.choose([1, 2, 4, 8, 16, 32]))
    passes = g.integer(0, 3)
    if rows * columns * depth > 8192:
        return
    out = I32 if kind == I8 else F32
    bound, grain = kind.bound**2 * depth * max(passes, 1) * 2, kind.grain**2
    if kind.is_float and not F32.exact(bound + F32.bound, grain):
        return
    steps = str(passes) if g.chance(5) else f"tl.minimum(n3, {passes})"
    k_end = g.choose([passes * depth, max(0, passes * depth - 1), depth, depth // 2, g.integer(0, 3 * depth)])
    carried = g.chance(6)
    sides = []
    for memory, shape, axis in ((left, (rows, depth), 1), (right, (depth, columns), 0)):
        sides.append(_Side(g, memory, shape, axis, passes * depth, carried))
    start = g.exact_like((rows, columns), out) if g.chance(4) else None
    if start and start.kind.is_float and not F32.exact(bound + start.bound, min(grain, start.grain)):
        start = None
    zero = f"tl.zeros(({rows}, {columns}), dtype=tl.{out.triton})"
    total = g.assign(f"({start.text} + 0)" if start else zero, "acc")
    limit, step = (bound + start.bound, min(grain, start.grain)) if start else (bound, grain)
    made = Value(total, (rows, columns), out, limit, step)
    counter = g.name("k")
    with g.block(f"for {counter} in range({steps}):", repeats=3):
        texts = [side.load(g, counter, k_end if g.chance(5) else None) for side in sides]
        a, b = (g.assign(text, "t") for text in texts)
        b = _touched(g, b, kind)
        tail = ", out_dtype=tl.int32" if kind == I8 else ', input_precision="ieee"'
        if g.chance(5):
            g.emit(f"{total} = tl.dot({a}, {b}, {total}{tail})")
        else:
            g.emit(f"{total} += tl.dot({a}, {b}{tail})")
        if left.writable and g.chance(2):
            store(g, Value(a, (rows, depth), kind, kind.bound, kind.grain))
        if g.chance(2):
            g.scope.append(made)
            meanwhile(g)
        for side in sides:
            side.advance(g)
    g.scope.append(made)


def attention_loop(g: Builder) -> None:
    """Scores, running maxima and weighted sums, as in flash attention, with weights 0 and 1 so that all is exact."""
    memories = [m for m in g.memories if m.kind in (F32, F16) and m.name != "shared"]
    if not memories:
        return
    keys = g.choose(memories)
    values = g.choose([m for m in memories if m.kind == keys.kind])
    kind = keys.kind
    rows, inner = g.choose([1, 2, 8, 16]), g.choose([1, 2, 8, 16])
    width, columns = g.choose([1, 4, 16]), g.choose([1, 8, 16])
    passes = g.integer(0, 3)
    score_bound, bound = kind.bound**2 * inner, kind.bound * columns * max(1, passes)
    query = g.exact_like((rows, inner), kind)
    if query.bound > kind.bound or query.grain < kind.grain or not kind.exact(bound, kind.grain):
        return
    query = g.define(query)
    key_side = _Side(g, keys, (inner, columns), 1, passes * columns, g.chance(5))
    value_side = _Side(g, values, (columns, width), 0, passes * columns, g.chance(5))
    peak = g.assign(f"tl.full(({rows},), -{2 * score_bound}, tl.float32)", "c")
    total = g.assign(f"tl.zeros(({rows}, {width}), dtype=tl.float32)", "acc")
    count = g.assign(f"tl.zeros(({rows},), dtype=tl.float32)", "c")
    counter = g.name("k")
    end = g.integer(0, passes * columns) if g.chance(5) else None
    with g.block(f"for {counter} in range({passes if g.chance(5) else f'tl.minimum(n3, {passes})'}):", repeats=3):
        k = g.assign(key_side.load(g, counter, end), "t")
        scores = g.assign(f'tl.dot({query.text}, {k}, input_precision="ieee")', "t")
        if end is not None:
            inside = f"(tl.arange(0, {columns}) + {counter} * {columns} < {end})[None, :]"
            scores = g.assign(f"tl.where({inside}, {scores}, -{2 * score_bound})", "t")
        higher = g.assign(f"tl.maximum({peak}, tl.max({scores}, 1))", "t")
        weights = g.assign(f"({scores} == {higher}[:, None]).to(tl.{kind.triton})", "t")
        kept = g.assign(f"({peak} == {higher}).to(tl.float32)", "t")
        v = g.assign(value_side.load(g, counter, end), "t")
        g.emit(f"{count} = {count} * {kept} + tl.sum({weights}.to(tl.float32), 1)")
        if g.chance(5):
            g.emit(f"{total} = {total} * {kept}[:, None]")
            g.emit(f'{total} = tl.dot({weights}, {v}, {total}, input_precision="ieee")')
        else:
            product = f'tl.dot({weights}, {v}, input_precision="ieee")'
            g.emit(f"{total} = {total} * {kept}[:, None] + {product}")
        g.emit(f"{peak} = {higher}")
        key_side.advance(g)
        value_side.advance(g)
    g.scope.append(Value(total, (rows, width), F32, bound, kind.grain))
    g.scope.append(Value(count, (rows,), F32, float(columns * max(1, passes)), 1.0))
    g.scope.append(Value(peak, (rows,), F32, 2 * score_bound, kind.grain**2))


def _touched(g: Builder, text: str, kind: Kind) -> str:
    """The operand itself, or after work that a product may have to do again for every block."""
    option = g.choose(["as it is", "as it is", "negated", "selected"])
    if option == "negated":
        return g.assign(f"-{text}" if kind.is_float else f"(0 - {text}).to(tl.int8)", "t")
    if option == "selected":
        limit = "0.0" if kind.is_float else "0"
        return g.assign(f"tl.where({text} > {limit}, {text}, {limit}).to(tl.{kind.triton})", "t")
    return text


class _Side:
    """One operand of `product_loop`: where its tiles lie, pass after pass, and how it is loaded."""

    def __init__(
        self, g: Builder, memory: Memory, shape: tuple[int, int], axis: int, extent: int, carried: bool
    ) -> None:
        self.memory, self.shape, self.axis, self.carried = memory, shape, axis, carried
        along_k = g.chance(5)
        other = shape[1 - axis]
        depth = shape[axis]
        pitch = max(extent, 1) if along_k else other
        self.k_step, self.other_step = (1, pitch) if along_k else (pitch, 1)
        self.flipped = g.chance(3)  # loaded the other way around, and transposed
        self.depth = depth
        self.end = (max(extent, depth) - 1) * self.k_step + (other - 1) * self.other_step
        self.place = g.assign(self._offsets(), "at")
        self.pointer = ""
        if carried:
            self.pointer = g.assign(f"{memory.name} + {memory.base} + {self.place}", "p")
        self.base = g.assign("tl.full((), 0, tl.int32)", "o")

    def _offsets(self) -> str:
        index = {True: "[:, None]", False: "[None, :]"}
        first = (self.axis == 0) != self.flipped
        k = f"tl.arange(0, {self.depth}){index[first]} * {self.k_step}"
        return f"{k} + tl.arange(0, {self.shape[1 - self.axis]}){index[not first]} * {self.other_step}"

    def load(self, g: Builder, counter: str, k_end: int | None) -> str:
        first = (self.axis == 0) != self.flipped
        where = f"({self.place} + {self.base})"
        conditions = [f"({where} < {self.memory.room})"] if self.end >= self.memory.room else []
        if self.memory.limit:
            conditions.append(f"({self.memory.base} + {where} < {self.memory.limit})")
        lanes = "[:, None]" if first else "[None, :]"
        if k_end is not None:
            k = f"(tl.arange(0, {self.depth}) + {counter} * {self.depth})"
            how = g.choose(["prefix", "prefix", "suffix", "holes", "data"])
            if how == "data":
                conditions.append(g.like((), I1).text)
            else:
                tests = {"prefix": f"{k} < {k_end}", "suffix": f"{k} >= {k_end}", "holes": f"{k} % 3 != 1"}
                conditions.append(f"({tests[how]}){lanes}")
        if g.chance(3):
            end = g.integer(0, self.shape[1 - self.axis])
            others = "[None, :]" if first else "[:, None]"
            conditions.append(f"(tl.arange(0, {self.shape[1 - self.axis]}) < {end}){others}")
        pointer = self.pointer or f"{self.memory.name} + {self.memory.base} + {where}"
        zero = "0.0" if self.memory.kind.is_float else "0"
        mask = f", mask={' & '.join(conditions)}, other={zero}" if conditions else ""
        text = f"tl.load({pointer}{mask})"
        return f"tl.trans({text})" if self.flipped else text

    def advance(self, g: Builder) -> None:
        if self.pointer:
            g.emit(f"{self.pointer} += {self.depth * self.k_step}")
        g.emit(f"{self.base} += {self.depth * self.k_step}")
