"""Element types, and the classes of float that programs keep their values in."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Kind:
    """`precision` is a float's significand in bits (0 for integers); `bound` and `grain` describe what buffers hold.

    A float is tracked as a multiple of `grain` no larger than `bound`. While bound / grain fits the significand every
    order of evaluation gives the same bits, fused or not, so results are compared exactly and may steer control flow.
    """

    name: str
    triton: str
    torch: torch.dtype
    bits: int
    signed: bool = True
    precision: int = 0
    bound: float = 0.0
    grain: float = 0.0

    @property
    def is_float(self) -> bool:
        return self.precision > 0

    @property
    def is_bool(self) -> bool:
        return self.bits == 1

    @property
    def is_int(self) -> bool:
        return not self.is_float and not self.is_bool

    @property
    def epsilon(self) -> float:
        return 2.0 ** (1 - self.precision)

    @property
    def slack(self) -> float:
        """The absolute error that a buffer of rounded floats may carry: see `Value.error`."""
        return self.bound * max(1e-4, 40 * self.epsilon)

    def exact(self, bound: float, grain: float) -> bool:
        return grain > 0 and bound / grain <= 2**self.precision

    def literal_range(self) -> tuple[int, int]:
        """Of an integer type, both ends included."""
        return (-(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1) if self.signed else (0, (1 << self.bits) - 1)


I1 = Kind("i1", "int1", torch.bool, 1, signed=False)
I8 = Kind("i8", "int8", torch.int8, 8)
I16 = Kind("i16", "int16", torch.int16, 16)
I32 = Kind("i32", "int32", torch.int32, 32)
I64 = Kind("i64", "int64", torch.int64, 64)
U8 = Kind("u8", "uint8", torch.uint8, 8, signed=False)
U16 = Kind("u16", "uint16", torch.uint16, 16, signed=False)
U32 = Kind("u32", "uint32", torch.uint32, 32, signed=False)
U64 = Kind("u64", "uint64", torch.uint64, 64, signed=False)
F32 = Kind("f32", "float32", torch.float32, 32, precision=24, bound=32, grain=1 / 8)
F16 = Kind("f16", "float16", torch.float16, 16, precision=11, bound=16, grain=1 / 2)
BF16 = Kind("bf16", "bfloat16", torch.bfloat16, 16, precision=8, bound=8, grain=1 / 2)

INTS = (I32, I64, I8, I16, U8, U32, U16, U64)
FLOATS = (F32, F16, BF16)
KINDS = {k.name: k for k in (*FLOATS, *INTS, I1)}
