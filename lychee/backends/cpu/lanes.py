"""How a tile's value changes along each axis: the facts that make vector loads and maskless paths provable.

A stride is 0 (uniform along the axis), an int (pointers: bytes), DYNAMIC (a constant step that only the run knows) or
GENERAL. Integers of 32 and 64 bits are taken not to wrap between the elements of one tile, as Triton's own axis
analysis does, unless the text shows that they do; narrower ones have strides only where it shows that they do not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from . import elementwise
from .llvm import BYTES
from .ttir import Op, Value

DYNAMIC: Literal["dynamic"] = "dynamic"
GENERAL: Literal["general"] = "general"
Stride = int | Literal["dynamic", "general"]
SAME = {"arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast", "tt.bitcast"}
_BOUNDED = {"arith.extsi", "arith.extui", "arith.trunci", "tt.broadcast", "tt.expand_dims", "tt.trans"}
_BOUNDED |= {"arith.addi", "arith.subi", "arith.muli"}


@dataclass
class Strides:
    """Strides of values, found on demand. `inductions` maps a loop's carried tile to its initial value."""

    inductions: dict[Value, Value] = field(default_factory=dict)
    known: dict[Value, tuple[Stride, ...]] = field(default_factory=dict)
    limits: dict[Value, tuple[int, int] | None] = field(default_factory=dict)
    wrapping: set[Value] = field(default_factory=set)

    def of(self, value: Value) -> tuple[Stride, ...]:
        if value not in self.known:
            found = self._find(value)
            if any(found) and self.wraps(value):
                found = tuple(GENERAL if s else 0 for s in found)
            self.known[value] = found
        return self.known[value]

    def is_uniform(self, value: Value) -> bool:
        return all(s == 0 for s in self.of(value))

    def constant(self, value: Value) -> int | None:
        """The value of a tile or scalar that is one known integer."""
        op = value.op
        if op is None:
            return None
        if op.name == "arith.constant":
            return op.attrs["value"] if isinstance(op.attrs["value"], int) else None
        if op.name in ("tt.splat", "tt.broadcast", "tt.expand_dims", "arith.extsi"):
            return self.constant(op.operands[0])
        return None

    def bounds(self, value: Value) -> tuple[int, int] | None:
        """The least and the largest value of a tile of indices that only the text decides."""
        if value not in self.limits:
            found = self._bounds(value)
            bits = 8 * BYTES.get(value.type.elem, 8)
            fits = found is not None and -(1 << bits - 1) <= found[0] and found[1] < 1 << bits - 1
            self.limits[value] = found if fits else None
            if found is not None and not fits:
                self.wrapping.add(value)
        return self.limits[value]

    def _bounds(self, value: Value) -> tuple[int, int] | None:
        op, known = value.op, self.constant(value)
        if known is not None:
            return known, known
        if op is None or value.type.elem == "i1":
            return None
        if op.name == "tt.make_range":
            return op.attrs["start"], op.attrs["end"] - 1
        sides = [self.bounds(o) for o in op.operands] if op.name in _BOUNDED else [None]
        if None in sides:
            return None
        (low, high), *others = [s for s in sides if s is not None]
        if op.name == "arith.extui" and low < 0:
            return None
        if not others:
            return low, high
        least, most = others[0]
        if op.name == "arith.addi":
            return low + least, high + most
        if op.name == "arith.subi":
            return low - most, high - least
        corners = [x * y for x in (low, high) for y in (least, most)]
        return min(corners), max(corners)

    def wraps(self, value: Value) -> bool:
        """Whether an integer tile's elements may not lie on a line, their type being too narrow for it."""
        return self.bounds(value) is None and (value in self.wrapping or value.type.elem in ("i8", "i16"))

    def decided(self, op: Op) -> bool | None:
        """What a comparison of indices gives everywhere, if it is one answer and the text decides it."""
        sides = [self.bounds(o) for o in op.operands] if op.name == "arith.cmpi" else [None]
        if None in sides:
            return None
        (low, high), (least, most) = sides  # type: ignore[misc]
        answers = {2: (high < least, low >= most), 3: (high <= least, low > most)}
        answers |= {4: (low > most, high <= least), 5: (low >= most, high < least)}
        always, never = answers.get(op.attrs["predicate"], (False, False))
        return True if always else False if never else None

    def _find(self, value: Value) -> tuple[Stride, ...]:
        shape, op = value.type.shape, value.op
        if op is None:
            if value in self.inductions:
                return self.of(self.inductions[value])
            return (GENERAL,) * len(shape)
        name = op.name
        if name in ("arith.constant", "tt.splat"):
            return (0,) * len(shape)
        if name == "tt.make_range":
            return (1,)
        if name == "tt.expand_dims":
            inner = list(self.of(op.operands[0]))
            inner.insert(op.attrs["axis"], 0)
            return tuple(inner)
        if name == "tt.broadcast":
            source = op.operands[0]
            pairs = zip(self.of(source), source.type.shape, shape, strict=True)
            return tuple(0 if old != new else stride for stride, old, new in pairs)
        if name == "tt.trans":
            inner = list(self.of(op.operands[0]))
            return tuple(inner[axis] for axis in op.attrs["order"])
        if name == "tt.reshape":
            return self._reshaped(op)
        if name in SAME and not (name == "tt.bitcast" and value.type.elem != op.operands[0].type.elem):
            return self.of(op.operands[0])
        if name in ("arith.addi", "arith.subi", "tt.addptr", "arith.muli"):
            return self._arithmetic(op)
        if name != "tt.load" and not elementwise.supports(name):
            return (GENERAL,) * len(shape)
        axes = [self.of(o) for o in op.operands if o.type.is_tile]
        return tuple(0 if all(a[d] == 0 for a in axes) else GENERAL for d in range(len(shape)))

    def _reshaped(self, op: Op) -> tuple[Stride, ...]:
        source, shape = op.operands[0], op.results[0].type.shape
        strides = self.of(source)
        if all(s == 0 for s in strides):
            return (0,) * len(shape)
        lone = [s for s, size in zip(strides, source.type.shape, strict=True) if size > 1]
        if len(lone) == 1 and isinstance(lone[0], int):
            found: list[Stride] = []
            step = lone[0]
            for size in reversed(shape):
                found.insert(0, step if size > 1 else 0)
                step *= size
            return tuple(found)
        return (GENERAL,) * len(shape)

    def _arithmetic(self, op: Op) -> tuple[Stride, ...]:
        a, b = (self.of(o) for o in op.operands)
        if op.name == "arith.muli":
            factors = [self.constant(o) for o in op.operands]
            return tuple(_product(x, y, factors) for x, y in zip(a, b, strict=True))
        scale = BYTES[op.results[0].type.pointee] if op.name == "tt.addptr" else 1
        sign = -1 if op.name == "arith.subi" else 1
        return tuple(_sum(x, y, sign * scale) for x, y in zip(a, b, strict=True))


def _sum(a: Stride, b: Stride, scale: int) -> Stride:
    if isinstance(a, int) and isinstance(b, int):
        return a + scale * b
    return GENERAL if GENERAL in (a, b) else DYNAMIC


def _product(a: Stride, b: Stride, factors: list[int | None]) -> Stride:
    if a == 0 and b == 0:
        return 0
    if GENERAL in (a, b) or (a != 0 and b != 0):
        return GENERAL
    stride, factor = (a, factors[1]) if b == 0 else (b, factors[0])
    return stride * factor if isinstance(stride, int) and factor is not None else DYNAMIC
