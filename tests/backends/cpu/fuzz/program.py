"""What the generator makes and the workers run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.backends.cpu.fuzz.kinds import KINDS
from tests.backends.cpu.memory import Guarded, guarded


@dataclass(frozen=True)
class Buffer:
    """`size` elements of `kind`, drawn by `seed`; `tolerance` is the absolute error allowed afterwards (0: none)."""

    kind: str
    size: int
    seed: int
    at_start: bool = False
    tolerance: float = 0.0

    def make(self) -> Guarded:
        """Filled, and flush with an inaccessible page after it, or before it if `at_start`."""
        kind = KINDS[self.kind]
        generator = torch.Generator().manual_seed(self.seed)
        if kind.is_float:
            steps = int(kind.bound / kind.grain)
            values = (torch.randint(-steps, steps + 1, (self.size,), generator=generator) * kind.grain).to(kind.torch)
        elif kind.is_bool:
            values = torch.randint(0, 2, (self.size,), generator=generator) > 0
        else:
            words = torch.randint(-(2**31), 2**31, (self.size, 2), generator=generator)
            wide = (words[:, 0] << 32) ^ words[:, 1]
            shift = torch.randint(0, 64, (self.size,), generator=generator)  # as many small numbers as large ones
            values = _cut(torch.where(shift % 2 == 0, wide, wide >> shift), kind.torch)
        return guarded(values, at_start=self.at_start)


def _cut(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The low bits of int64 values."""
    size = torch.empty(0, dtype=dtype).element_size()
    narrow = values.contiguous().view(torch.uint8).view(-1, 8)[:, :size].contiguous()
    return narrow.view(dtype).view(-1)


@dataclass(frozen=True)
class Pointer:
    """Passes a buffer from element `offset` on."""

    buffer: int
    offset: int = 0


@dataclass(frozen=True)
class Program:
    """`source` defines `kernel`, called with `arguments` in order and `constants` by name over `grid`."""

    source: str
    buffers: tuple[Buffer, ...]
    arguments: tuple[Pointer | int | float, ...]
    constants: tuple[tuple[str, int], ...]
    grid: tuple[int, int, int]

    def __repr__(self) -> str:
        """What hypothesis shows: enough to run it by hand."""
        rest = (f"Buffers {self.buffers}", f"arguments {self.arguments}", f"{self.constants}", f"grid {self.grid}")
        return "\n".join(["", self.source, *rest])
