"""Rotary position embedding (arXiv:2104.09864): the table of angles that every scaling type reduces to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lychee.kernels.types import RopeTable


@dataclass(frozen=True)
class RopeConfig:
    """`theta` is the base of the wavelengths; the other values are read by the types that name them.

    linear: every frequency over `factor` (positions interpolated).

    llama3: wavelengths beyond original_max_position_embeddings / low_freq_factor over `factor`, those below
    original / high_freq_factor kept, a straight blend between.

    yarn (arXiv:2309.00071): dimensions that turn fewer than `beta_slow` times in the original length over `factor`,
    those that turn more than `beta_fast` times kept, a straight blend between; `truncate` widens that to whole
    dimensions. Cosines and sines are times `attention_factor`.

    dynamic: `theta` grows with the length once it exceeds the original. A position's length is its own, position + 1,
    which is what decoding token by token over a KV cache makes of it: keys stay as they were rotated when they were
    new. So neither the batch, nor the prompt's length, nor what came after counts.
    """

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def reach(self, max_position: int) -> int:
        """Positions there are for a config of that max_position_embeddings: dynamic and yarn count from the original
        length, whose `factor` fold they are made for; the other types' configs give the scaled length."""
        if self.type not in ("dynamic", "yarn"):
            return max_position
        return max(max_position, int(min(self.original_max_position_embeddings * self.factor, 1e9)))


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position, [head_dim / 2] fp32, computed as the models were trained: in fp32. Of dynamic, those
    within the original length."""
    frequencies = _unscaled(rope.theta, head_dim)
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type in ("llama3", "yarn"):
        kept = _kept_by_wavelength(rope, frequencies) if rope.type == "llama3" else _kept_by_turns(rope, head_dim)
        return (1 - kept) * frequencies / rope.factor + kept * frequencies
    return frequencies


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device | str = "cpu") -> RopeTable:
    """Cosines, then sines, of position * frequency, [num_positions, head_dim] fp32."""
    positions = torch.arange(num_positions, dtype=torch.float32)[:, None]
    if rope.type == "dynamic":
        frequencies = _unscaled(_grown_theta(rope, head_dim, positions), head_dim)
    else:
        frequencies = inverse_frequencies(rope, head_dim)
    angles = positions * frequencies
    return (torch.cat([angles.cos(), angles.sin()], dim=-1) * rope.attention_factor).to(device)


def _unscaled(theta: float | Tensor, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (theta**exponents)


def _grown_theta(rope: RopeConfig, head_dim: int, positions: Tensor) -> Tensor:
    """The base for each position's length; theta up to the original one."""
    original = rope.original_max_position_embeddings
    over = ((positions.double() + 1) / original).clamp(min=1.0)
    growth = (rope.factor * over - (rope.factor - 1)) ** (head_dim / (head_dim - 2))
    return (rope.theta * growth).float()


def _kept_by_wavelength(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    original = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    span = rope.high_freq_factor - rope.low_freq_factor
    return ((original / wavelengths - rope.low_freq_factor) / span).clamp(0.0, 1.0)


def _kept_by_turns(rope: RopeConfig, head_dim: int) -> Tensor:
    def dimension(turns: float) -> float:
        """That which turns so often in the original length."""
        length = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    return 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
