"""Arithmetic of grids and blocks on the host. Triton's functions of these names take microseconds a call."""

from __future__ import annotations

from torch import Tensor


def runs_on_cpu(x: Tensor) -> bool:
    """Whether a launch on this tensor is compiled for the CPU, and so wants the CPU's tile sizes."""
    return x.is_cpu


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n; n >= 1."""
    return 1 << (n - 1).bit_length()
