"""Writes the body of an LLVM function over vectors, in text."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

SIGN = -1 << 31  # of an fp32 value's bit pattern
_SCALARS = {"f32": ("float", 32), "f64": ("double", 64)}


@dataclass
class Writer:
    """Writes the body of a function of `lanes` lanes of `elem`, mostly an instruction per method.

    Values are LLVM names; where a method takes numbers, too, they are constants for every lane.
    """

    lanes: int
    elem: str
    avx512: bool = False
    lines: list[str] = field(default_factory=list)
    callees: list[str] = field(default_factory=list)
    declares: dict[str, None] = field(default_factory=dict)

    @property
    def vector(self) -> str:
        """The type of the vector's values."""
        return self._lanes_of(_SCALARS[self.elem][0])

    @property
    def pattern(self) -> str:
        """The type of their bit patterns."""
        return self._lanes_of(f"i{_SCALARS[self.elem][1]}")

    def _lanes_of(self, scalar: str) -> str:
        return scalar if self.lanes == 1 else f"<{self.lanes} x {scalar}>"

    def _constant(self, scalar: str, value: str) -> str:
        return value if self.lanes == 1 else f"splat ({scalar} {value})"

    def _float(self, value: str | float) -> str:
        if isinstance(value, str):
            return value
        scalar, bits = _SCALARS[self.elem]
        nearest = struct.unpack("<f", struct.pack("<f", value))[0] if bits == 32 else value
        return self._constant(scalar, "0x" + struct.pack(">d", nearest).hex().upper())

    def _int(self, value: str | int) -> str:
        return value if isinstance(value, str) else self._constant(f"i{_SCALARS[self.elem][1]}", str(value))

    def _emit(self, instruction: str) -> str:
        name = f"%v{len(self.lines)}"
        self.lines.append(f"{name} = {instruction}")
        return name

    def _intrinsic(self, name: str, *operands: str | float) -> str:
        symbol = f"@llvm.{name}.{'' if self.lanes == 1 else f'v{self.lanes}'}{self.elem}"
        self.declares[f"declare {self.vector} {symbol}({', '.join([self.vector] * len(operands))})"] = None
        values = ", ".join(f"{self.vector} {self._float(operand)}" for operand in operands)
        return self._emit(f"call {self.vector} {symbol}({values})")

    def fma(self, a: str | float, b: str | float, c: str | float) -> str:
        """a * b + c, rounded once."""
        return self._intrinsic("fma", a, b, c)

    def sqrt(self, a: str) -> str:
        return self._intrinsic("sqrt", a)

    def add(self, a: str | float, b: str | float) -> str:
        return self._emit(f"fadd {self.vector} {self._float(a)}, {self._float(b)}")

    def sub(self, a: str | float, b: str | float) -> str:
        return self._emit(f"fsub {self.vector} {self._float(a)}, {self._float(b)}")

    def mul(self, a: str | float, b: str | float) -> str:
        return self._emit(f"fmul {self.vector} {self._float(a)}, {self._float(b)}")

    def div(self, a: str | float, b: str | float) -> str:
        return self._emit(f"fdiv {self.vector} {self._float(a)}, {self._float(b)}")

    def horner(self, x: str, coefficients: Sequence[float]) -> str:
        """A polynomial of x."""
        value = self.fma(x, coefficients[0], coefficients[1])
        for coefficient in coefficients[2:]:
            value = self.fma(value, x, coefficient)
        return value

    def integer(self, opcode: str, a: str | int, b: str | int) -> str:
        """add, sub, and, or, xor, shl, lshr or ashr of bit patterns."""
        return self._emit(f"{opcode} {self.pattern} {self._int(a)}, {self._int(b)}")

    def bits(self, a: str) -> str:
        return self._emit(f"bitcast {self.vector} {a} to {self.pattern}")

    def from_bits(self, a: str) -> str:
        return self._emit(f"bitcast {self.pattern} {a} to {self.vector}")

    def to_float(self, a: str) -> str:
        """The value of a signed integer."""
        return self._emit(f"sitofp {self.pattern} {a} to {self.vector}")

    def test(self, a: str, bit: int) -> str:
        """A mask of the bit patterns that have it."""
        return self._emit(f"icmp ne {self.pattern} {self.integer('and', a, bit)}, {self._int(0)}")

    def compare(self, a: str | float, condition: str, b: str | float) -> str:
        """A mask; `condition` is an ordered one (olt, ogt, oeq, ...), false where either side is NaN."""
        return self._emit(f"fcmp {condition} {self.vector} {self._float(a)}, {self._float(b)}")

    def select(self, mask: str, a: str | float, b: str | float) -> str:
        """a where the mask is set, b elsewhere."""
        values = f"{self.vector} {self._float(a)}, {self.vector} {self._float(b)}"
        return self._emit(f"select {self._lanes_of('i1')} {mask}, {values}")

    def at_most(self, x: str, bound: float) -> str:
        """x, or the bound where x exceeds it; NaN stays NaN."""
        return self.select(self.compare(x, "ogt", bound), bound, x)

    def at_least(self, x: str, bound: float) -> str:
        return self.select(self.compare(x, "olt", bound), bound, x)

    def magnitude(self, x: str) -> tuple[str, str]:
        """(|x|, a bit pattern of the sign alone)."""
        pattern = self.bits(x)
        return self.from_bits(self.integer("and", pattern, ~SIGN)), self.integer("and", pattern, SIGN)

    def negate(self, x: str, sign: str) -> str:
        """x, negated where the bit pattern `sign` is the sign bit and not 0."""
        return self.from_bits(self.integer("xor", self.bits(x), sign))

    def scalef(self, a: str, n: str) -> str:
        """a * 2^n, rounded once, of 4, 8 or 16 fp32 lanes; AVX-512 F, and VL below 16 lanes."""
        symbol = f"@llvm.x86.avx512.mask.scalef.ps.{32 * self.lanes}"
        tail = ["i16", "i32"] if self.lanes == 16 else ["i8"]
        self.declares[f"declare {self.vector} {symbol}({', '.join([*[self.vector] * 3, *tail])})"] = None
        # every lane of the mask is set, and rounding is as the control register says
        constants = ", ".join(f"{kind} {value}" for kind, value in zip(tail, (-1, 4), strict=False))
        values = f"{self.vector} {a}, {self.vector} {n}, {self.vector} zeroinitializer, {constants}"
        return self._emit(f"call {self.vector} {symbol}({values})")

    def libm(self, name: str, x: str, attribute: str = "") -> str:
        """The C function of that name (without the f of fp32's), lane by lane; the attribute is one of the call."""
        scalar, bits = _SCALARS[self.elem]
        name += "f" if bits == 32 else ""
        self.declares[f"declare {scalar} @{name}({scalar}) nounwind willreturn memory(none)"] = None
        if self.lanes == 1:
            return self._emit(f"call {scalar} @{name}({scalar} {x}) {attribute}")
        symbol = f"@lychee.libm.{name}.x{self.lanes}"
        self.callees.append(
            f"define internal {self.vector} {symbol}({self.vector} %x) noinline nounwind {{\n"
            "entry:\n  br label %next\nnext:\n"
            "  %i = phi i32 [0, %entry], [%j, %next]\n"
            f"  %before = phi {self.vector} [poison, %entry], [%after, %next]\n"
            f"  %lane = extractelement {self.vector} %x, i32 %i\n"
            f"  %value = call {scalar} @{name}({scalar} %lane)\n"
            f"  %after = insertelement {self.vector} %before, {scalar} %value, i32 %i\n"
            "  %j = add i32 %i, 1\n"
            f"  %more = icmp ult i32 %j, {self.lanes}\n"
            f"  br i1 %more, label %next, label %done\ndone:\n  ret {self.vector} %after\n}}\n"
        )
        return self._emit(f"call {self.vector} {symbol}({self.vector} {x}) {attribute}")

    def patch(self, mask: str, result: str, name: str, x: str) -> str:
        """`result`, but libm's where the mask is set; nothing is called while no lane asks for it. Once in a body."""
        some = mask
        if self.lanes > 1:
            whole = self._emit(f"bitcast {self._lanes_of('i1')} {mask} to i{self.lanes}")
            some = self._emit(f"icmp ne i{self.lanes} {whole}, 0")
        self.lines += [f"br i1 {some}, label %rare, label %done", "rare:"]
        patched = self.select(mask, self.libm(name, x, "cold"), result)
        self.lines += ["br label %done", "done:"]
        return self._emit(f"phi {self.vector} [{result}, %entry], [{patched}, %rare]")
