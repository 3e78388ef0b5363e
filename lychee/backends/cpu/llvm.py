"""A text builder for LLVM IR and the values it computes with.

16-bit floats live in registers as fp32 that hold representable values, so that every op computes in fp32 and rounds
once; they have their own width only in memory.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from .errors import UnsupportedError
from .target import Target

REGISTER = {"f16": "float", "bf16": "float", "f32": "float", "f64": "double", "ptr": "ptr"}
STORED = {"f16": "half", "bf16": "i16", "f32": "float", "f64": "double", "ptr": "ptr", "i1": "i8"}
BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "ptr": 8}
FLOATS = ("f16", "bf16", "f32", "f64")
SCALAR_COST = 0.15  # nanoseconds an instruction takes, roughly
BYTE_COST = 0.08  # nanoseconds a byte takes that one thread fetches from beyond its caches


@dataclass(frozen=True)
class Val:
    """One value for every lane of a vector, in one of three forms:

    uniform  lanes 0, step "": `ref` is a scalar
    affine   lanes 0, step set: lane i holds ref + i * step (integers; pointers step in bytes)
    vector   lanes n: `ref` is an <n x T>

    `ref` and `step` are SSA names or literals. `align` divides the ref of an index.
    """

    elem: str
    ref: str
    lanes: int = 0
    step: str = ""
    align: int = 1

    @property
    def is_uniform(self) -> bool:
        return not self.lanes and not self.step

    @property
    def is_affine(self) -> bool:
        return not self.lanes and bool(self.step)

    @property
    def literal(self) -> int | None:
        """The value of a uniform integer that is known while compiling."""
        return literal(self.ref) if self.is_uniform else None


def literal(ref: str) -> int | None:
    if ref in ("true", "false"):
        return int(ref == "true")
    return int(ref) if ref.lstrip("-").isdigit() else None


def integer(value: int, elem: str = "i32") -> Val:
    if elem == "i1":
        return Val("i1", "true" if value & 1 else "false")
    bits = 8 * BYTES[elem]
    value = (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
    align = value & -value if value else 1 << 30
    return Val(elem, str(value), align=align)


def floating(value: float, elem: str) -> Val:
    """A float literal, rounded to the type first; LLVM wants fp32 as the bits of the equal double."""
    if elem != "f64":
        value = struct.unpack("<f", struct.pack("<f", value))[0] if abs(value) < 3.5e38 else value
    return Val(elem, f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}")


def register(elem: str, lanes: int = 0) -> str:
    """The LLVM type of a register."""
    scalar = REGISTER.get(elem, elem)
    return f"<{lanes} x {scalar}>" if lanes else scalar


def suffix(elem: str, lanes: int) -> str:
    """How intrinsics spell a type: v8f32, i64."""
    scalar = "f64" if elem == "f64" else "f32" if elem in FLOATS else "p0" if elem == "ptr" else elem
    return f"v{lanes}{scalar}" if lanes else scalar


_PURE = re.compile(
    r"(f?(add|sub|mul|div|neg|cmp)|and|or|xor|shl|[al]shr|icmp|select|[sz]ext|trunc|fp(ext|trunc)|bitcast"
    r"|getelementptr|insertelement|shufflevector|extractelement|call i\d+ @llvm\.[su](min|max|add|sub))\b"
)


class Builder:
    """Lines of one function, in order, with the loops and stack buffers they need."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.lines: list[str] = []
        self.known: list[dict[str, str]] = [{}]  # pure instructions and their names, by region
        self.buffers: list[str] = []
        self.stack_bytes = 0
        self.declares: set[str] = set()
        self.functions: dict[str, str] = {}
        self.count = 0
        self.label = "entry"
        self.weight = 1.0  # times the enclosing loops run, as far as known
        self.cost = 0.0

    def name(self, prefix: str = "t") -> str:
        self.count += 1
        return f"%{prefix}{self.count}"

    def emit(self, line: str) -> None:
        self.lines.append("  " + line)
        self.cost += self.weight * SCALAR_COST

    def op(self, text: str) -> str:
        """A name for an instruction's result. A pure one stands once in a region, a scalar once for regions inside.

        Vectors are computed again there: a register that waits for another loop is spilled.
        """
        regions = self.known[-1:] if "<" in text else self.known
        if found := next((region[text] for region in reversed(regions) if text in region), None):
            self.cost += self.weight * SCALAR_COST
            return found
        name = self.name()
        self.emit(f"{name} = {text}")
        if _PURE.match(text):
            self.known[-1][text] = name
        return name

    def call(self, result: str, function: str, *args: tuple[str, str]) -> str:
        """Call and declare a function or intrinsic; args are (type, ref)."""
        types = ", ".join(t for t, _ in args)
        self.declares.add(f"declare {result} @{function}({types})")
        text = f"call {result} @{function}({', '.join(f'{t} {r}' for t, r in args)})"
        if result != "void":
            return self.op(text)
        self.emit(text)
        return ""

    # Control flow

    def place(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self.label = label

    def branch(self, label: str) -> None:
        self.emit(f"br label %{label}")

    def labels(self, *kinds: str) -> list[str]:
        self.count += 1
        return [f"{kind}{self.count}" for kind in kinds]

    @contextmanager
    def loop(
        self,
        low: str,
        high: str,
        step: str,
        elem: str = "i32",
        signed: bool = True,
        trips: float = 4.0,
        small: bool = False,
    ) -> Iterator[str]:
        """for i in range(low, high, step): the body is what is emitted inside; gives i. step > 0.

        `small`: high + step is known not to overflow.
        """
        head, body, done = self.labels("head", "body", "done")
        before, index, following = self.label, self.name("i"), self.name("n")
        patch = len(self.lines) + 2
        self.branch(head)
        self.place(head)
        self.lines.append("")  # the phi, once the body's last label is known
        with self.region():
            less = self.op(f"icmp {'slt' if signed else 'ult'} {elem} {index}, {high}")
            self.emit(f"br i1 {less}, label %{body}, label %{done}")
            self.place(body)
            known = [literal(r) for r in (low, high, step)]
            if None not in known:
                trips = max(1.0, (known[1] - known[0]) / known[2])  # type: ignore[operator]
            self.weight *= trips
            yield index
        self.emit(f"{following} = add {'nuw nsw ' if small else ''}{elem} {index}, {step}")
        self.weight /= trips
        self.lines[patch] = f"  {index} = phi {elem} [ {low}, %{before} ], [ {following}, %{self.label} ]"
        self.branch(head)
        self.place(done)

    @contextmanager
    def seldom(self) -> Iterator[None]:
        """What is emitted inside hardly ever runs, and costs nothing."""
        weight, self.weight = self.weight, 0.0
        yield
        self.weight = weight

    @contextmanager
    def when(self, condition: str) -> Iterator[None]:
        """if condition: what is emitted inside."""
        if condition == "true":
            yield
            return
        then, done = self.labels("then", "endif")
        self.emit(f"br i1 {condition}, label %{then}, label %{done}")
        self.place(then)
        with self.region():
            yield
        self.branch(done)
        self.place(done)

    @contextmanager
    def region(self) -> Iterator[None]:
        """What is emitted inside may not run: its names are not known outside."""
        self.known.append({})
        yield
        self.known.pop()

    def half(self, lanes: int) -> str:
        """The LLVM type of fp16 in memory."""
        if not self.target.half:
            raise UnsupportedError("fp16 needs a CPU that converts it (F16C): use bf16 or fp32")
        return f"<{lanes} x half>" if lanes else "half"

    # Memory

    def stack(self, llvm_type: str, size: int, align: int = 64) -> str:
        """A buffer of `size` bytes that lives as long as the program instance."""
        name = self.name("s")
        self.buffers.append(f"  {name} = alloca {llvm_type}, align {align}")
        self.stack_bytes += size
        return name

    def slot(self, elem: str, lanes: int = 0) -> str:
        return self.stack(register(elem, lanes), BYTES[elem] * max(1, lanes), 64 if lanes > 4 else 16 if lanes else 8)

    def get(self, slot: str, elem: str, lanes: int = 0) -> Val:
        return Val(elem, self.op(f"load {register(elem, lanes)}, ptr {slot}"), lanes)

    def put(self, value: Val, slot: str) -> None:
        self.emit(f"store {register(value.elem, value.lanes)} {value.ref}, ptr {slot}")

    # Integers and vectors

    def add(self, a: str, b: str, elem: str) -> str:
        x, y = literal(a), literal(b)
        if x is not None and y is not None:
            return integer(x + y, elem).ref
        return b if x == 0 else a if y == 0 else self.op(f"add {elem} {a}, {b}")

    def sub(self, a: str, b: str, elem: str) -> str:
        x, y = literal(a), literal(b)
        if x is not None and y is not None:
            return integer(x - y, elem).ref
        return a if y == 0 else self.op(f"sub {elem} {a}, {b}")

    def mul(self, a: str, b: str, elem: str) -> str:
        x, y = literal(a), literal(b)
        if x is not None and y is not None:
            return integer(x * y, elem).ref
        if x == 0 or y == 0:
            return "0"
        return b if x == 1 else a if y == 1 else self.op(f"mul {elem} {a}, {b}")

    def least(self, a: str, b: str) -> str:
        """The smaller of two i32."""
        x, y = literal(a), literal(b)
        if x is not None and y is not None:
            return str(min(x, y))
        return self.call("i32", "llvm.smin.i32", ("i32", a), ("i32", b))

    def widen(self, ref: str, source: str, target: str = "i64") -> str:
        """A signed integer in a wider (or equal) type."""
        if source == target or literal(ref) is not None:
            return ref
        return self.op(f"sext {source} {ref} to {target}")

    def both(self, a: str, b: str) -> str:
        """a and b, scalar booleans."""
        if a == "true" or b == "false":
            return b
        if b == "true" or a == "false":
            return a
        return self.op(f"and i1 {a}, {b}")

    def splat(self, ref: str, elem: str, lanes: int) -> str:
        kind = register(elem)
        if not ref.startswith("%"):
            return f"splat ({kind} {ref})"
        first = self.op(f"insertelement <{lanes} x {kind}> poison, {kind} {ref}, i32 0")
        return self.op(
            f"shufflevector <{lanes} x {kind}> {first}, <{lanes} x {kind}> poison, <{lanes} x i32> zeroinitializer"
        )

    def shuffle(self, a: str, b: str, elem: str, lanes: int, order: list[int]) -> str:
        kind = register(elem, lanes)
        mask = ", ".join(f"i32 {i}" for i in order)
        return self.op(f"shufflevector {kind} {a}, {kind} {b}, <{len(order)} x i32> <{mask}>")

    def vector(self, value: Val, lanes: int) -> str:
        """The value as an <lanes x T>, or as a scalar for lanes 0."""
        if not lanes:
            return value.ref
        if value.lanes:
            return value.ref
        if value.is_uniform:
            return self.splat(value.ref, value.elem, lanes)
        elem = "i64" if value.elem == "ptr" else value.elem
        kind, known = register(elem, lanes), literal(value.step)
        steps = f"<{', '.join(f'{elem} {integer(i * (known or 1), elem).ref}' for i in range(lanes))}>"
        if known is None:
            steps = self.op(f"mul {kind} {self.splat(value.step, elem, lanes)}, {steps}")
        if value.elem == "ptr":
            return self.op(f"getelementptr i8, ptr {value.ref}, {kind} {steps}")
        return self.op(f"add {kind} {self.splat(value.ref, elem, lanes)}, {steps}")

    def as_vector(self, value: Val, lanes: int) -> Val:
        return value if value.lanes or not lanes else Val(value.elem, self.vector(value, lanes), lanes)

    def lane(self, value: Val, lane: int) -> Val:
        """One lane as a scalar."""
        if value.is_uniform:
            return value
        if value.lanes:
            ref = self.op(f"extractelement {register(value.elem, value.lanes)} {value.ref}, i32 {lane}")
        elif value.elem == "ptr":
            ref = self.op(f"getelementptr i8, ptr {value.ref}, i64 {self.mul(value.step, str(lane), 'i64')}")
        else:
            ref = self.add(value.ref, self.mul(value.step, str(lane), value.elem), value.elem)
        return replace(value, ref=ref, lanes=0, step="")

    def lanes(self, value: Val, first: int, count: int) -> Val:
        """`count` lanes of a vector (of a scalar: itself), as a scalar if it is one."""
        if count == 1:
            return self.lane(value, first)
        if count == value.lanes:
            return value
        order = list(range(first, first + count))
        return Val(value.elem, self.shuffle(value.ref, value.ref, value.elem, value.lanes, order), count)
