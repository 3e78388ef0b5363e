"""Rotary position embedding (arXiv:2104.09864): the frequency table that every scaling type reduces to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lychee.kernels.types import RopeTable

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """`theta` is the base of the wavelengths; the other values are read by the types that name them.

    linear: every frequency over `factor` (positions interpolated). llama3: wavelengths beyond
    original_max_position_embeddings / low_freq_factor over `factor`, those below original / high_freq_factor kept,
    a straight blend between.
    """

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position, [head_dim / 2] fp32, computed as the models were trained: in fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "llama3":
        original = rope.original_max_position_embeddings
        wavelengths = 2 * math.pi / frequencies
        span = rope.high_freq_factor - rope.low_freq_factor
        kept = ((original / wavelengths - rope.low_freq_factor) / span).clamp(0.0, 1.0)
        return (1 - kept) * frequencies / rope.factor + kept * frequencies
    return frequencies


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device | str = "cpu") -> RopeTable:
    """Cosines, then sines, of position * frequency."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)
