"""What quantised weights stand for: the references of the ops that read them, and what their samples are made of."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .types import Int4Weight, Int8Weight

RUN = 16  # a packed byte holds the elements j and j + RUN of a run of 2 * RUN


def group_size(in_features: int, weight: Int8Weight | Int4Weight) -> int:
    """Elements of a row that share a scale. Raises ValueError where the weight's parts do not fit each other or x."""
    if isinstance(weight, Int8Weight):
        return _group(in_features, weight.values.shape[1], weight.scales.shape[1], (in_features, 32))
    return _group(in_features, 2 * weight.packed.shape[1], weight.scales.shape[1], (32, 64, 128))


@cache
def _group(in_features: int, found: int, groups: int, allowed: tuple[int, ...]) -> int:
    if found != in_features:
        raise ValueError(f"weight has {found} in_features, x has {in_features}: they must be equal")
    group = in_features // groups if groups else 0
    if group not in allowed or group * groups != in_features:
        raise ValueError(
            f"weight has {groups} scales in a row of {in_features}, must have one per {' or '.join(map(str, allowed))}"
        )
    return group


def dequantize(weight: Int8Weight | Int4Weight) -> Tensor:
    """fp32 [out_features, in_features]."""
    scales = weight.scales.float()[..., None]
    if isinstance(weight, Int8Weight):
        quants, minimums = weight.values, torch.zeros_like(scales)
    else:
        runs = weight.packed.unflatten(1, (-1, RUN))
        quants = torch.cat([runs & 15, runs >> 4], dim=-1).flatten(1)
        minimums = -8 * scales if weight.minimums is None else weight.minimums.float()[..., None]
    dense: Tensor = (quants.float().unflatten(1, (scales.shape[1], -1)) * scales + minimums).flatten(1)
    return dense


def sample_int8(out_features: int, in_features: int, groups_of: int, device: str) -> Int8Weight:
    """Rows of about unit length; `groups_of` 0 is one scale per row."""
    values = torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8, device=device)
    groups = in_features // groups_of if groups_of else 1
    scales = torch.rand(out_features, groups, device=device) * (0.02 * in_features**-0.5)
    return Int8Weight(values, scales.half())


def sample_int4(
    out_features: int, in_features: int, groups_of: int, minimums: int, exact: int, device: str
) -> Int4Weight:
    """As above. `minimums` 0 leaves them out, `exact` has fp32 scales."""
    packed = torch.randint(0, 256, (out_features, in_features // 2), dtype=torch.uint8, device=device)
    shape, dtype = (out_features, in_features // groups_of), torch.float32 if exact else torch.float16
    scales = (torch.rand(shape, device=device) * (0.2 * in_features**-0.5)).to(dtype)
    lowest = (torch.rand(shape, device=device) * (-2.0 * in_features**-0.5)).to(dtype)
    return Int4Weight(packed, scales, lowest if minimums else None)
