"""Linear layers over int8 weights, for any number of rows: decode class, prefill and the language-model head.

The kernel is that of dense weights. A scale per row multiplies the sum, scales of groups multiply the weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import sizes
from .linear import Config, cpu_config, linear_kernel
from .op import op
from .quantized import dequantize, group_size, sample_int8
from .sizes import cdiv
from .types import Bias, Cost, Features, Int8Weight, Projected, ProjectedF32

GROUPS = (0, 32)  # elements per scale; 0: all of a row


def linear_int8_reference(x: Features, weight: Int8Weight, bias: Bias | None = None) -> Projected:
    return F.linear(x, dequantize(weight).to(x.dtype), bias)


def linear_int8_prefill_reference(x: Features, weight: Int8Weight, bias: Bias | None = None) -> Projected:
    return F.linear(x, dequantize(weight).to(x.dtype), bias)


def lm_head_int8_reference(x: Features, weight: Int8Weight) -> ProjectedF32:
    return F.linear(x.float(), dequantize(weight).to(x.dtype).float())


def lm_head_int8_sample(
    dtype: torch.dtype, device: str, *, num_tokens: int, in_features: int, out_features: int, grouped: int
) -> dict[str, Any]:
    groups_of = GROUPS[grouped]
    in_features = max(groups_of, in_features - in_features % groups_of) if groups_of else in_features
    x = torch.randn(num_tokens, in_features, dtype=dtype, device=device)
    return {"x": x, "weight": sample_int8(out_features, in_features, groups_of, device)}


def linear_int8_sample(
    dtype: torch.dtype,
    device: str,
    *,
    num_tokens: int,
    in_features: int,
    out_features: int,
    has_bias: int,
    grouped: int,
) -> dict[str, Any]:
    sizes = {"num_tokens": num_tokens, "in_features": in_features, "out_features": out_features, "grouped": grouped}
    inputs = lm_head_int8_sample(dtype, device, **sizes)
    return {**inputs, "bias": torch.randn(out_features, dtype=dtype, device=device) if has_bias else None}


def linear_int8_cost(x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Cost:
    return _cost(x, weight, x.element_size(), 0 if bias is None else bias.nbytes)


def lm_head_int8_cost(x: Tensor, weight: Int8Weight) -> Cost:
    return _cost(x, weight, 4, 0)


def _cost(x: Tensor, weight: Int8Weight, item: int, more: int) -> Cost:
    (num_tokens, in_features), out_features = x.shape, weight.values.shape[0]
    moved = x.nbytes + weight.values.nbytes + weight.scales.nbytes + item * num_tokens * out_features + more
    return Cost(flops=2 * num_tokens * in_features * out_features, bytes=moved)


def block_k(in_features: int, largest: int) -> int:
    """A power of two from 32 that divides in_features, which is a multiple of 32."""
    return min(largest, in_features & -in_features)


def gpu_config(out_features: int, in_features: int, prefill: bool, grouped: bool) -> Config:
    """Tile sizes; a row's sum depends on block_k alone, and that on the weight."""
    k = block_k(in_features, 128) if grouped else 128
    if prefill:
        return Config(64, 64, min(64, k), num_warps=4, num_stages=3)
    return Config(16, 64 if out_features >= 8192 else 32, k, num_warps=4, num_stages=4)


def _launch(y: Tensor, x: Tensor, weight: Int8Weight, bias: Tensor | None, prefill: bool = False) -> None:
    (num_tokens, in_features), out_features = x.shape, weight.values.shape[0]
    group = group_size(in_features, weight)
    group = 0 if group == in_features else group
    if sizes.runs_on_cpu(x):
        config, row_tiles, options = cpu_config(num_tokens, out_features, in_features, prefill), 1, {}
        if group:
            config = config._replace(block_k=block_k(in_features, config.block_k))
    else:
        config = gpu_config(out_features, in_features, prefill, bool(group))
        tiles = cdiv(num_tokens, config.block_m)
        row_tiles = 1 if prefill else min(4, sizes.next_power_of_2(tiles))
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    linear_kernel[cdiv(num_tokens, row_tiles * config.block_m), cdiv(out_features, config.block_n)](
        y,
        x,
        weight.values,
        weight.scales,
        bias,
        num_tokens,
        out_features,
        in_features,
        group,
        config.rows,
        config.width,
        row_tiles,
        config.block_m,
        config.block_n,
        config.block_k,
        **options,
    )


@op(
    reference=linear_int8_reference,
    sample=linear_int8_sample,
    cost=linear_int8_cost,
    typical={"num_tokens": 16, "in_features": 4096, "out_features": 4096, "has_bias": 0, "grouped": 0},
)
def linear_int8(y: Tensor, x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> None:
    """y = x weight^T + bias for the rows of a decode batch; a row's bits do not depend on the others."""
    _launch(y, x, weight, bias)


@op(
    reference=lm_head_int8_reference,
    sample=lm_head_int8_sample,
    cost=lm_head_int8_cost,
    typical={"num_tokens": 16, "in_features": 4096, "out_features": 32000, "grouped": 0},
)
def lm_head_int8(y: Tensor, x: Tensor, weight: Int8Weight) -> None:
    """y = x weight^T as `linear_int8`, kept in fp32: logits."""
    _launch(y, x, weight, None)


@op(
    reference=linear_int8_prefill_reference,
    sample=linear_int8_sample,
    cost=linear_int8_cost,
    typical={"num_tokens": 2048, "in_features": 4096, "out_features": 4096, "has_bias": 0, "grouped": 0},
)
def linear_int8_prefill(y: Tensor, x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> None:
    """y = x weight^T + bias for many rows. On the CPU its bits are those of `linear_int8`."""
    _launch(y, x, weight, bias, prefill=True)
