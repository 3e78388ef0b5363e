"""The state of a program while it is being written: lines, the values in scope, and how operands are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from hypothesis import strategies as st

from tests.backends.cpu.fuzz.kinds import FLOATS, I1, I32, INTS, Kind
from tests.backends.cpu.fuzz.program import Buffer, Pointer

T = TypeVar("T")
Shape = tuple[int, ...]
LARGEST = 1024  # elements of a tile
SLOWEST = 64  # elements of a tile that the interpreter reduces or scans one by one


def size_of(shape: Shape) -> int:
    total = 1
    for dim in shape:
        total *= dim
    return total


@dataclass(frozen=True)
class Value:
    """An expression of a kernel. Floats: |value| <= bound, a multiple of grain (0: rounded, off by up to error)."""

    text: str
    shape: Shape
    kind: Kind
    bound: float = 0.0
    grain: float = 0.0
    error: float = 0.0
    mutable: bool = False

    @property
    def exact(self) -> bool:
        return not self.kind.is_float or self.grain > 0


@dataclass(frozen=True)
class Memory:
    """A pointer argument. A program may touch elements [0, room) from its base on; `limit` names the buffer's size
    if the last program's room ends beyond it. Only stores to `writable` ones, and only loads of others from other
    programs' rooms, so programs do not race."""

    name: str
    buffer: int
    kind: Kind
    room: int
    base: str
    limit: str
    writable: bool
    programs: int
    rounded: bool = False


@dataclass
class Builder:
    """Draws through hypothesis, so that smaller draws are simpler programs."""

    draw: Callable[[st.SearchStrategy], object]
    lines: list[str] = field(default_factory=list)
    indent: int = 1
    count: int = 0
    scope: list[Value] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    memories: list[Memory] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    arguments: list[tuple[str, Pointer | int | float]] = field(default_factory=list)
    constants: list[tuple[str, int]] = field(default_factory=list)
    base: Shape = (1,)
    depth: int = 0
    repeats: int = 1  # how often the line being written may run

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))  # type: ignore[return-value]

    def choose(self, options: Sequence[T]) -> T:
        return options[self.integer(0, len(options) - 1)]

    def chance(self, tenths: int) -> bool:
        """True in so many of ten draws; shrinks to False."""
        return self.integer(0, 9) >= 10 - tenths

    def emit(self, line: str) -> None:
        self.lines.append("    " * self.indent + line)

    def name(self, prefix: str = "v") -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def define(self, value: Value) -> Value:
        """Gives an expression a name and puts it in scope."""
        value = replace(value, text=self.assign(value.text), mutable=False)
        self.scope.append(value)
        return value

    def assign(self, text: str, prefix: str = "v") -> str:
        name = self.name(prefix)
        self.emit(f"{name} = {text}")
        return name

    @contextmanager
    def block(self, header: str, repeats: int = 1) -> Iterator[None]:
        """An indented block; what it defines goes out of scope."""
        self.emit(header)
        outer, length = list(self.scope), len(self.lines)
        self.indent += 1
        self.depth += 1
        self.repeats *= repeats
        yield
        if len(self.lines) == length:
            self.emit("pass")
        self.repeats //= repeats
        self.indent -= 1
        self.depth -= 1
        self.scope = outer

    # Operands. Asking for a value may draw one in scope, convert one, or write a constant.

    def find(self, fits: Callable[[Value], bool]) -> Value | None:
        found = [v for v in self.scope if fits(v)]
        if not found:
            return None
        value = found[len(found) - 1 - self.integer(0, len(found) - 1)]  # shrinks to the latest
        self.used.add(value.text)
        return value

    def any_tile(self) -> Value:
        value = self.find(lambda v: v.shape != ()) if self.chance(6) else None
        value = value or self.find(lambda v: True)
        assert value is not None
        return value

    def like(self, shape: Shape, kind: Kind) -> Value:
        """A value of this shape and kind."""
        same = self.find(lambda v: v.shape == shape and v.kind == kind)
        if same and self.integer(0, 9) < 7:
            return same
        other = self.find(lambda v: v.shape == shape or _spreads(v.shape, shape))
        if other and self.integer(0, 9) < 7:
            return self.spread(self.cast(other, kind), shape)
        return self.constant(shape, kind)

    def integers(self, shape: Shape, kind: Kind = I32) -> Value:
        return self.like(shape, kind)

    def condition(self, shape: Shape) -> Value:
        return self.like(shape, I1)

    def exact_like(self, shape: Shape, kind: Kind) -> Value:
        """As `like`, but never a rounded float."""
        value = self.like(shape, kind)
        return value if value.exact else self.constant(shape, kind)

    def scalar_integer(self, modulus: int) -> str:
        """The text of a scalar in [0, modulus), a power of two."""
        value = self.find(lambda v: v.shape == () and v.kind.is_int)
        if value is None or self.integer(0, 9) < 3:
            return str(self.integer(0, modulus - 1))
        return f"({value.text}.to(tl.int32) & {modulus - 1})"

    def constant(self, shape: Shape, kind: Kind) -> Value:
        if kind.is_bool:
            return Value(f"tl.full({shape}, {self.integer(0, 1)}, tl.int1)", shape, kind)
        if kind.is_int:
            low, high = kind.literal_range()
            number = self.draw(st.one_of(st.integers(max(low, -9), 9), st.sampled_from([low, high, high // 3])))
            return Value(f"tl.full({shape}, {number}, tl.{kind.triton})", shape, kind)
        number = self.integer(-4, 4) * kind.grain
        text = f"tl.full({shape}, {number}, tl.float32)"
        text = text if kind.triton == "float32" else f"{text}.to(tl.{kind.triton})"
        return Value(text, shape, kind, abs(number), kind.grain)

    def literal(self, kind: Kind) -> Value:
        """A Python number that keeps the kind of what it meets."""
        if kind.is_int:
            return Value(str(self.integer(0, 9)), (), kind)
        number = self.integer(-4, 4) * kind.grain
        return Value(repr(number), (), kind, abs(number), kind.grain)

    def spread(self, value: Value, shape: Shape) -> Value:
        """Broadcast to a shape that `_spreads` allows."""
        if value.shape == shape:
            return value
        if len(value.shape) == len(shape) or value.shape == ():
            if value.shape == () and not value.text.isidentifier():
                value = replace(value, text=self.assign(value.text))
            return replace(value, text=f"tl.broadcast_to({value.text}, {shape})", shape=shape, mutable=False)
        axis = self.choose([a for a in range(len(shape)) if value.shape == shape[:a] + shape[a + 1 :]])
        middle = (*shape[:axis], 1, *shape[axis + 1 :])
        text = f"tl.broadcast_to(tl.expand_dims({value.text}, {axis}), {shape})"
        assert len(middle) == len(shape)
        return replace(value, text=text, shape=shape, mutable=False)

    def cast(self, value: Value, kind: Kind) -> Value:
        """Converts where the answer is defined: floats are clipped and integers masked first."""
        source, text = value.kind, value.text
        if source == kind:
            return value
        to = f".to(tl.{kind.triton})"
        if not source.is_float and not kind.is_float:
            return replace(value, text=f"({text}){to}", kind=kind, mutable=False)
        if not source.is_float:
            if source.is_bool:
                return Value(f"({text}){to}", value.shape, kind, 1.0, 1.0)
            mask = 7 if kind.precision < 11 else 15
            masked = f"(({text} & {mask}) - {mask // 2})" if source.signed else f"({text} & {mask})"
            return Value(f"{masked}{to}", value.shape, kind, float(mask), 1.0)
        if not kind.is_float:
            if not value.exact:
                return self.constant(value.shape, kind)
            if kind.is_bool:
                return Value(f"({text} > {self.integer(-2, 2)})", value.shape, kind)
            text = f"({text}).to(tl.float32)" if source.triton != "float32" else text
            text = text if kind.signed else f"tl.abs({text})"
            text = f"tl.clamp({text}, -100.0, 100.0)" if value.bound > 100 else f"({text})"
            return Value(f"{text}{to}", value.shape, kind)
        grain = value.grain if kind.exact(value.bound, value.grain) else 0.0
        error = value.error + (0.0 if grain else value.bound * kind.epsilon)
        bound = value.bound
        if bound > 30000 and kind.triton == "float16":
            text, bound = f"tl.clamp({text}, -1000.0, 1000.0)", 1000.0
        return Value(f"({text}){to}", value.shape, kind, bound, grain, error)

    def fit(self, value: Value, kind: Kind, rounded: bool) -> Value | None:
        """The value made to hold to what buffers and carried variables of its kind promise; None if it cannot."""
        if not kind.is_float:
            return value
        bound = kind.bound
        if not rounded and not value.exact:
            return None
        if rounded and value.error > kind.slack / 2:
            return None
        text, back = value.text, "" if kind.triton == "float32" else f".to(tl.{kind.triton})"
        if not rounded and value.grain < kind.grain:
            wide = text if kind.triton == "float32" else f"({text}).to(tl.float32)"
            text = f"(tl.floor({wide} * {1 / kind.grain}) * {kind.grain}){back}"
            bound -= kind.grain
        if value.bound > bound:
            text = f"tl.clamp({text}, -{bound}, {bound}){back}"
        error = value.error if rounded else 0.0
        return Value(text, value.shape, kind, kind.bound, 0.0 if rounded else kind.grain, error)

    def some_kind(self) -> Kind:
        return self.choose((*FLOATS[:1], I32, I1, *FLOATS[1:], *INTS[1:]))


def _spreads(small: Shape, large: Shape) -> bool:
    """Whether `spread` takes one to the other."""
    if small == ():
        return True
    if len(small) == len(large):
        return small != large and all(a in (1, b) for a, b in zip(small, large, strict=True))
    return any(small == large[:a] + large[a + 1 :] for a in range(len(large)))
