"""The state of lowering one kernel, and evaluation by pull: a tile is a function from an index to a value.

`Frame.at(value, index, lanes)` emits what is needed to know a tile's value at an index. One component of the index may
stand for `lanes` consecutive places; the result is then uniform, affine or a vector over them. Tiles in `buffers` are
read from memory, all others are computed on the spot, so a chain of elementwise ops becomes one loop without
temporaries. order.py decides which tiles get a buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from . import elementwise
from .errors import UnsupportedError
from .lanes import Strides
from .llvm import BYTES, Builder, Val, integer, literal, register
from .target import Target
from .ttir import Op, Type, Value

Index = tuple[Val, ...]
MAX_STACK = 4 << 20  # bytes of tiles one program may hold; threads have 8 MiB of stack


@dataclass(frozen=True)
class Buffer:
    """A tile in memory, row-major, or `turned`: column-major; 16-bit floats as fp32."""

    ref: str
    shape: tuple[int, ...]
    elem: str
    turned: bool = False

    @property
    def axis(self) -> int:
        """The one along which neighbours lie side by side."""
        return 0 if self.turned else len(self.shape) - 1

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * BYTES[self.stored]

    @property
    def stored(self) -> str:
        return "f32" if self.elem in ("f16", "bf16") else self.elem


@dataclass(frozen=True)
class Induction:
    """A carried tile that is its initial value plus a scalar number of elements kept in a slot."""

    initial: Value
    slot: str  # of an i64


class Frame:
    def __init__(self, target: Target, strides: Strides, forced: set[Value], uses: dict[Value, list[Op]]) -> None:
        self.b = Builder(target)
        self.target = target
        self.strides = strides
        self.forced = forced
        self.uses = uses
        self.env: dict[Value, Val] = {}
        self.buffers: dict[Value, Buffer] = {}
        self.inductions: dict[Value, Induction] = {}
        self.targets: dict[Value, Buffer] = {}  # where products go that have a place already
        self.proven: frozenset[Op] = frozenset()
        self.scopes: list[dict[tuple[Value, Index, int], Val]] = [{}]

    @contextmanager
    def scope(self, proven: frozenset[Op] = frozenset()) -> Iterator[None]:
        """Code that may not run, or runs many times: what is computed inside is not known outside."""
        before = self.proven
        self.proven |= proven
        self.scopes.append({})
        yield
        self.scopes.pop()
        self.proven = before

    @contextmanager
    def loop(self, low: str, high: str, step: int, elem: str = "i32", trips: float = 4.0) -> Iterator[Val]:
        """An index counting up; a loop of one trip is no loop."""
        bounds = literal(low), literal(high)
        if None not in bounds and bounds[1] - bounds[0] == step:  # type: ignore[operator]
            yield integer(bounds[0] or 0, elem)
            return
        with self.b.loop(low, high, str(step), elem, trips=trips, small=True) as index, self.scope():
            start = literal(low)
            align = math.gcd(step, start) if start is not None else 1
            yield Val(elem, index, align=align)

    def buffer(self, kind: Type, turned: bool = False) -> Buffer:
        made = Buffer("", kind.shape, kind.elem, turned)
        made = replace(made, ref=self.b.stack(f"[{made.bytes} x i8]", made.bytes))
        if self.b.stack_bytes > MAX_STACK:
            raise UnsupportedError(
                f"the kernel's tiles need more than {MAX_STACK >> 20} MiB per program: use smaller block sizes"
            )
        return made

    def scalar(self, value: Value) -> Val:
        return self.env[value]

    def at(self, value: Value, index: Index, lanes: int) -> Val:
        if not value.type.is_tile:
            return self.env[value]
        if value.op in self.proven:
            return integer(1, "i1")
        key = (value, index, lanes)
        for scope in reversed(self.scopes):
            if key in scope:
                return scope[key]
        found = self._compute(value, index, lanes)
        self.scopes[-1][key] = found
        return found

    def _compute(self, value: Value, index: Index, lanes: int) -> Val:
        from . import memory, shapes

        if value in self.buffers:
            return memory.read_buffer(self, self.buffers[value], index, lanes)
        if value in self.inductions:
            return self._induced(value, index, lanes)
        op = value.op
        if op is None:
            raise AssertionError(f"{value.name} has neither a definition nor a buffer")
        if (answer := self.strides.decided(op)) is not None:
            return integer(int(answer), "i1")
        if op.name == "tt.load":
            return memory.load(self, op, index, lanes)
        if op.name in shapes.MAPS:
            return shapes.MAPS[op.name](self, op, value, index, lanes)
        operands = [self.at(o, index, lanes) for o in op.operands]
        return elementwise.apply(self.b, op, operands, lanes)

    def _induced(self, value: Value, index: Index, lanes: int) -> Val:
        induction = self.inductions[value]
        start = self.at(induction.initial, index, lanes)
        moved = self.b.get(induction.slot, "i64")
        kind = value.type
        if kind.elem == "ptr":
            distance = self.b.mul(moved.ref, str(BYTES[kind.pointee]), "i64")
            if start.lanes:
                text = f"getelementptr i8, <{lanes} x ptr> {start.ref}, i64 {distance}"
            else:
                text = f"getelementptr i8, ptr {start.ref}, i64 {distance}"
            return Val("ptr", self.b.op(text), start.lanes, start.step)
        ref = moved.ref if kind.elem == "i64" else self.b.op(f"trunc i64 {moved.ref} to {kind.elem}")
        if start.lanes:
            wide = self.b.splat(ref, kind.elem, lanes)
            return Val(kind.elem, self.b.op(f"add {register(kind.elem, lanes)} {start.ref}, {wide}"), lanes)
        return Val(kind.elem, self.b.add(start.ref, ref, kind.elem), step=start.step)
