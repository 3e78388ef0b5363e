"""GPTQ checkpoints (arXiv:2210.17323) as AutoGPTQ and GPTQModel write them, of 4 and 8 bits.

With p = 32 / bits numbers in an int32, the first in its lowest bits: qweight [in_features / p, out_features] is packed
along in_features; qzeros [num_groups, out_features / p] along out_features; scales [num_groups, out_features]; g_idx
[in_features] is each element's group, i // group_size where it is missing. Under checkpoint_format "gptq" a stored zero
is one less than what it stands for, under "gptq_v2" it is the zero itself
(https://github.com/ModelCloud/GPTQModel, gptqmodel/utils/model.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .files import ModelError
from .packed_checkpoint import PackedCheckpoint
from .packed_weights import int4_weight, int8_weight, run_groups
from .tensor_source import QuantizedWeight

FORMATS = ("gptq", "gptq_v2")
SAMPLED_LAYERS, SAMPLED_COLUMNS, FEWEST_RUNS = 16, 64, 64  # by mean_offset


@dataclass(frozen=True)
class GPTQLayout:
    """`zero_offset`: what is added to a stored zero. `carries`: the writer subtracted it from whole int32s."""

    bits: int
    group_size: int
    zero_offset: int
    carries: bool

    @classmethod
    def parse(cls, where: str, settings: Mapping[str, Any]) -> GPTQLayout:
        """From a quantization_config. Raises ModelError naming the key, its value and what is allowed."""
        bits, group_size = settings.get("bits"), settings.get("group_size", -1)
        if type(bits) is not int or bits not in (4, 8):
            raise ModelError(f"{where}.bits is {str(bits)[:80]}, must be 4 or 8")
        if type(group_size) is not int or (group_size != -1 and (group_size < 32 or group_size % 32)):
            raise ModelError(f"{where}.group_size is {str(group_size)[:80]}, must be -1 or a multiple of 32")
        named = {key: settings[key] for key in ("checkpoint_format", "format") if settings.get(key) is not None}
        for key, value in named.items():
            if value not in FORMATS:
                raise ModelError(f"{where}.{key} is {str(value)[:80]!r}, must be {' or '.join(FORMATS)}")
        if len(set(named.values())) > 1:
            raise ModelError(f"{where} has one checkpoint_format and another format, must have one")
        if settings.get("is_marlin_format"):
            raise ModelError(f"{where}.is_marlin_format is true, must be false")
        v1 = "gptq_v2" not in named.values()
        return cls(bits, group_size, int(v1), v1 and _by_gptqmodel(settings.get("meta")))

    @property
    def name(self) -> str:
        return f"gptq-int{self.bits}"

    def in_features(self, qweight: tuple[int, ...]) -> int:
        return qweight[0] * (32 // self.bits)

    def group(self, in_features: int) -> int:
        return in_features if self.group_size == -1 else self.group_size

    def shapes(self, out_features: int, in_features: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        groups, per_int = in_features // self.group(in_features), 32 // self.bits
        return {
            "qweight": ("I32", (in_features // per_int, out_features)),
            "qzeros": ("I32", (groups, -(-out_features // per_int))),
            "scales": ("F", (groups, out_features)),
            "g_idx": ("I32", (in_features,)),
        }

    def convert(self, where: str, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        """Raises ModelError where g_idx or the zeros have no place in lychee's weights."""
        scales = parts["scales"]
        q, zeros = self.unpack(parts["qweight"], parts["qzeros"], scales.shape[1])
        g_idx = self.groups(parts, q.shape[1])
        if self.bits == 4:
            if bool((zeros == 16).any()):
                raise ModelError(f"{where}.qzeros has the zero 16, must be from 0 to 15: its writer let one overflow")
            return int4_weight(q, scales, zeros, run_groups(where, g_idx, len(scales)))
        if found := sorted({int(zero) for zero in torch.unique(zeros).tolist()} - {128}):
            raise ModelError(
                f"{where}.qzeros has the zero {found[0]}, must be 128 for 8 bits: symmetric, and stored as "
                f"checkpoint_format says ({FORMATS[1 - self.zero_offset]})"
            )
        runs = torch.zeros(1, dtype=torch.long) if len(scales) == 1 else run_groups(where, g_idx, len(scales), (32,))
        return int8_weight(q, scales, runs)

    def groups(self, parts: Mapping[str, Tensor], in_features: int) -> Tensor:
        """Each element's group [in_features]. A g_idx of zeros alone stands for neighbours, as a missing one does."""
        if "g_idx" in parts and bool(parts["g_idx"].any()):
            return parts["g_idx"]
        return torch.arange(in_features) // self.group(in_features)

    def unpack(self, qweight: Tensor, qzeros: Tensor, out_features: int) -> tuple[Tensor, Tensor]:
        """q, uint8 [out_features, in_features], and zeros, int16 [num_groups, out_features]."""
        q = _numbers(qweight.T, self.bits).flatten(1)
        if self.carries:
            qzeros = qzeros + (0x11111111 if self.bits == 4 else 0x01010101)
        zeros = _numbers(qzeros, self.bits).flatten(1)[:, :out_features].short()
        return q, zeros if self.carries else zeros + self.zero_offset


def _by_gptqmodel(meta: Any) -> bool:
    quantizer = meta.get("quantizer") if isinstance(meta, dict) else None
    names = quantizer if isinstance(quantizer, list) else [quantizer]
    return any(isinstance(name, str) and name.startswith("gptqmodel") for name in names)


def _numbers(packed: Tensor, bits: int) -> Tensor:
    """uint8 [rows, columns, 32 / bits] of int32 [rows, columns], from the lowest bits up."""
    octets = packed.contiguous().view(torch.uint8).view(*packed.shape, 4)
    return octets if bits == 8 else torch.stack([octets & 15, octets >> 4], dim=-1).flatten(2)


def open_gptq(path: Path, settings: Mapping[str, Any], config_values: Mapping[str, Any]) -> PackedCheckpoint:
    """Raises ModelError, also where the weights say that checkpoint_format is wrong."""
    where = f"{path / 'config.json'}: quantization_config"
    layout = GPTQLayout.parse(where, settings)
    opened = PackedCheckpoint.open(path, layout, config_values)
    mean = mean_offset(opened, layout) if layout.bits == 4 else 0.0
    if abs(mean) > 0.5:
        named = "checkpoint_format" in settings or "format" in settings
        raise ModelError(
            f"{where}.checkpoint_format is {'' if named else 'missing, so '}{FORMATS[1 - layout.zero_offset]}, which "
            f"puts the mean weight {abs(mean):.1f} steps from 0: the zeros were stored as {FORMATS[layout.zero_offset]}"
        )
    return opened


def mean_offset(opened: PackedCheckpoint, layout: GPTQLayout) -> float:
    """The mean of q - zero over a run of a row, in steps, as a median over many runs of a few layers.

    Weights are centred: within a tenth of a step for the right convention, one step off for the wrong one. 0 where
    the sample is too small to say.
    """
    layers = list(opened.parts.values())
    means = []
    for stored in layers[:: -(-len(layers) // SAMPLED_LAYERS)]:
        tensors = dict(opened.checkpoint.read(list(stored.values())))
        parts = {part: tensors[full] for part, full in stored.items()}
        columns = min(SAMPLED_COLUMNS, parts["scales"].shape[1])
        where = f"{opened.path}: {stored['qweight'].removesuffix('.qweight')}"
        words = -(-columns * layout.bits // 32)
        q, zeros = layout.unpack(parts["qweight"][:, :columns], parts["qzeros"][:, :words], columns)
        runs = run_groups(where, layout.groups(parts, q.shape[1]), len(zeros))
        means.append((q.view(columns, len(runs), -1).float().mean(2) - zeros[runs].T).flatten())
    offsets = torch.cat(means)
    return offsets.median().item() if len(offsets) >= FEWEST_RUNS else 0.0
