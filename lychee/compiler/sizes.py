"""Sizes that are known when a program is lowered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lychee.kernels.stand_in import Symbol

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Size(Symbol):
    """factor * name + offset."""

    name: str
    factor: int = 1
    offset: int = 0

    def __add__(self, more: int) -> Size:
        return Size(self.name, self.factor, self.offset + more)

    def __sub__(self, less: int) -> Size:
        return self + -less

    def __mul__(self, times: int) -> Size:
        return Size(self.name, self.factor * times, self.offset * times)

    __rmul__ = __mul__

    def __floordiv__(self, by: int) -> Size:
        if self.factor % by or self.offset % by:
            raise ValueError(f"{self} is not always a multiple of {by}")
        return Size(self.name, self.factor // by, self.offset // by)

    def __lt__(self, other: int) -> bool:
        """Only what holds of every size that is not negative."""
        if self.offset >= other:
            return False
        raise ValueError(f"whether {self} is below {other} is not known in a trace")

    def __str__(self) -> str:
        times = f"{self.factor}*" if self.factor != 1 else ""
        return f"{times}{self.name}" + (f"{self.offset:+}" if self.offset else "")

    def of(self, sizes: Sizes) -> int:
        return self.factor * sizes[self.name] + self.offset


Dim = int | Size


def concrete(size: Dim, sizes: Sizes) -> int:
    return size if isinstance(size, int) else size.of(sizes)
