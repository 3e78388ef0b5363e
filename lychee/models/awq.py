"""AWQ checkpoints (arXiv:2306.00978) as AutoAWQ writes them, of 4 bits and version "gemm".

Eight numbers in an int32, from the lowest bits up those of the columns 0, 2, 4, 6, 1, 3, 5, 7 of eight: qweight
[in_features, out_features / 8] and qzeros [num_groups, out_features / 8] are both packed along out_features; scales
[num_groups, out_features] (https://github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py).
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
from .packed_weights import int4_weight, run_groups
from .tensor_source import QuantizedWeight

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of the columns within their int32


@dataclass(frozen=True)
class AWQLayout:
    group_size: int

    @classmethod
    def parse(cls, where: str, settings: Mapping[str, Any]) -> AWQLayout:
        """From a quantization_config. Raises ModelError naming the key, its value and what is allowed."""
        bits = settings.get("bits", settings.get("w_bit"))
        if type(bits) is not int or bits != 4:
            raise ModelError(f"{where}.bits is {str(bits)[:80]}, must be 4")
        for key in ("version", "checkpoint_format", "format"):
            value = settings.get(key)
            if value is not None and str(value).lower() != "gemm":
                raise ModelError(f"{where}.{key} is {str(value)[:80]!r}, must be gemm")
        if settings.get("backend") not in (None, "autoawq"):
            raise ModelError(f"{where}.backend is {str(settings['backend'])[:80]!r}, must be autoawq")
        if settings.get("zero_point", True) is not True:
            raise ModelError(f"{where}.zero_point is {str(settings['zero_point'])[:80]}, must be true")
        group_size = settings.get("group_size", settings.get("q_group_size", 128))
        if type(group_size) is not int or (group_size != -1 and (group_size < 32 or group_size % 32)):
            raise ModelError(f"{where}.group_size is {str(group_size)[:80]}, must be -1 or a multiple of 32")
        return cls(group_size)

    @property
    def name(self) -> str:
        return "awq-int4"

    def in_features(self, qweight: tuple[int, ...]) -> int:
        return qweight[0]

    def group(self, in_features: int) -> int:
        return in_features if self.group_size == -1 else self.group_size

    def shapes(self, out_features: int, in_features: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        groups = in_features // self.group(in_features)
        return {
            "qweight": ("I32", (in_features, -(-out_features // 8))),
            "qzeros": ("I32", (groups, -(-out_features // 8))),
            "scales": ("F", (groups, out_features)),
        }

    def convert(self, where: str, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        scales, out_features = parts["scales"], parts["scales"].shape[1]
        q, zeros = (_rows(parts[part])[:out_features] for part in ("qweight", "qzeros"))
        g_idx = torch.arange(q.shape[1]) // self.group(q.shape[1])
        return int4_weight(q, scales, zeros.T.short(), run_groups(where, g_idx, len(scales)))


def _rows(packed: Tensor) -> Tensor:
    """uint8 [8 * columns, rows] of int32 [rows, columns]."""
    words = packed.T.contiguous()
    return torch.stack([(words >> 4 * place & 15).to(torch.uint8) for place in PLACES], dim=1).flatten(0, 1)


def open_awq(path: Path, settings: Mapping[str, Any], config_values: Mapping[str, Any]) -> PackedCheckpoint:
    """Raises ModelError."""
    layout = AWQLayout.parse(f"{path / 'config.json'}: quantization_config", settings)
    return PackedCheckpoint.open(path, layout, config_values)
