"""Linear layers over int4 weights, for any number of rows: decode class, prefill and the language-model head.

A packed byte holds two weights 16 apart, so there are two products, of the low halves and of the high ones, each with
its own half of x, that add to one sum.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from . import sizes
from .kernel import kernel
from .linear import cpu_config, store_tile, widened
from .linear_int8 import block_k, gpu_config
from .op import op
from .quantized import RUN, dequantize, group_size, sample_int4
from .sizes import cdiv
from .types import Bias, Cost, Features, Int4Weight, Projected, ProjectedF32

GROUPS = (32, 64, 128)  # elements per scale


def linear_int4_reference(x: Features, weight: Int4Weight, bias: Bias | None = None) -> Projected:
    return F.linear(x, dequantize(weight).to(x.dtype), bias)


def linear_int4_prefill_reference(x: Features, weight: Int4Weight, bias: Bias | None = None) -> Projected:
    return F.linear(x, dequantize(weight).to(x.dtype), bias)


def lm_head_int4_reference(x: Features, weight: Int4Weight) -> ProjectedF32:
    return F.linear(x.float(), dequantize(weight).to(x.dtype).float())


def lm_head_int4_sample(
    dtype: torch.dtype,
    device: str,
    *,
    num_tokens: int,
    in_features: int,
    out_features: int,
    group_kind: int,
    has_minimums: int,
    exact_scales: int,
) -> dict[str, Any]:
    groups_of = GROUPS[group_kind]
    in_features = max(groups_of, in_features - in_features % groups_of)
    x = torch.randn(num_tokens, in_features, dtype=dtype, device=device)
    return {"x": x, "weight": sample_int4(out_features, in_features, groups_of, has_minimums, exact_scales, device)}


def linear_int4_sample(
    dtype: torch.dtype,
    device: str,
    *,
    num_tokens: int,
    in_features: int,
    out_features: int,
    has_bias: int,
    group_kind: int,
    has_minimums: int,
    exact_scales: int,
) -> dict[str, Any]:
    inputs = lm_head_int4_sample(
        dtype,
        device,
        num_tokens=num_tokens,
        in_features=in_features,
        out_features=out_features,
        group_kind=group_kind,
        has_minimums=has_minimums,
        exact_scales=exact_scales,
    )
    return {**inputs, "bias": torch.randn(out_features, dtype=dtype, device=device) if has_bias else None}


def linear_int4_cost(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Cost:
    return _cost(x, weight, x.element_size(), 0 if bias is None else bias.nbytes)


def lm_head_int4_cost(x: Tensor, weight: Int4Weight) -> Cost:
    return _cost(x, weight, 4, 0)


def _cost(x: Tensor, weight: Int4Weight, item: int, more: int) -> Cost:
    (num_tokens, in_features), out_features = x.shape, weight.packed.shape[0]
    groups = weight.scales.nbytes * (1 if weight.minimums is None else 2)
    moved = x.nbytes + weight.packed.nbytes + groups + item * num_tokens * out_features + more
    return Cost(flops=2 * num_tokens * in_features * out_features, bytes=moved)


@triton.jit
def _dot_halves(
    acc,
    low,
    high,
    x_ptr,
    tile,
    num_tokens,
    in_features,
    start,
    RUN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HALF_K: tl.constexpr,
):
    """acc [BLOCK_N, BLOCK_M] plus halves of a weight tile [BLOCK_N, HALF_K] times one row tile's features."""
    offs_m = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = (offs_m < num_tokens)[None, None, :]
    offs_k = start + tl.arange(0, HALF_K // RUN)[:, None] * (2 * RUN) + tl.arange(0, RUN)[None, :]
    at = x_ptr + offs_m[None, None, :] * in_features + offs_k[:, :, None]
    low_x = tl.reshape(tl.load(at, mask=mask, other=0.0), (HALF_K, BLOCK_M))
    high_x = tl.reshape(tl.load(at + RUN, mask=mask, other=0.0), (HALF_K, BLOCK_M))
    acc = tl.dot(low, low_x, acc, input_precision="ieee")
    return tl.dot(high, high_x, acc, input_precision="ieee")


@kernel(do_not_specialize=["num_tokens"])
def _linear_int4_kernel(
    y_ptr,  # [num_tokens, out_features]
    x_ptr,  # [num_tokens, in_features]
    packed_ptr,  # [out_features, in_features / 2]
    scales_ptr,  # [out_features, in_features / GROUP]
    minimums_ptr,  # [out_features, in_features / GROUP] or None
    bias_ptr,  # [out_features] or None
    num_tokens,
    out_features,
    in_features,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # As the kernel of dense weights, see linear.py. BLOCK_K divides in_features.
    HALF_K: tl.constexpr = BLOCK_K // 2
    PER_BLOCK: tl.constexpr = BLOCK_K // GROUP if BLOCK_K > GROUP else 1  # scales of a row in a tile
    tile = tl.program_id(0) * ROW_TILES
    if ROWS > 0:
        tile, num_tokens = tl.full((), 0, tl.int32), ROWS
    if WIDTH > 0:
        in_features = WIDTH
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < out_features
    acc_0 = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    acc_1 = acc_0
    for start in range(0, in_features, BLOCK_K):
        offs_b = start // 2 + tl.arange(0, HALF_K)
        packed_at = packed_ptr + offs_n[:, None] * (in_features // 2) + offs_b[None, :]
        packed = tl.load(packed_at, mask=mask_n[:, None], other=0).to(tl.int32)
        offs_g = start // GROUP + tl.arange(0, PER_BLOCK)
        at = offs_n[:, None] * (in_features // GROUP) + offs_g[None, :]
        scales = tl.load(scales_ptr + at, mask=mask_n[:, None], other=0.0).to(tl.float32)
        scales = widened(scales, BLOCK_N, PER_BLOCK, HALF_K // PER_BLOCK)
        if minimums_ptr is None:
            low = ((packed & 15) - 8).to(tl.float32) * scales
            high = ((packed >> 4) - 8).to(tl.float32) * scales
        else:
            minimums = tl.load(minimums_ptr + at, mask=mask_n[:, None], other=0.0).to(tl.float32)
            minimums = widened(minimums, BLOCK_N, PER_BLOCK, HALF_K // PER_BLOCK)
            low = tl.fma((packed & 15).to(tl.float32), scales, minimums)
            high = tl.fma((packed >> 4).to(tl.float32), scales, minimums)
        low = low.to(x_ptr.dtype.element_ty)
        high = high.to(x_ptr.dtype.element_ty)
        acc_0 = _dot_halves(acc_0, low, high, x_ptr, tile, num_tokens, in_features, start, RUN, BLOCK_M, HALF_K)
        if ROW_TILES > 1:
            acc_1 = _dot_halves(acc_1, low, high, x_ptr, tile + 1, num_tokens, in_features, start, RUN, BLOCK_M, HALF_K)
    bias = tl.zeros((BLOCK_N,), dtype=tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    store_tile(y_ptr, acc_0, bias, tile, offs_n, num_tokens, out_features, BLOCK_M)
    if ROW_TILES > 1:
        store_tile(y_ptr, acc_1, bias, tile + 1, offs_n, num_tokens, out_features, BLOCK_M)


def _launch(y: Tensor, x: Tensor, weight: Int4Weight, bias: Tensor | None, prefill: bool = False) -> None:
    (num_tokens, in_features), out_features = x.shape, weight.packed.shape[0]
    group = group_size(in_features, weight)
    if sizes.runs_on_cpu(x):
        config, row_tiles, options = cpu_config(num_tokens, out_features, in_features, prefill), 1, {}
        config = config._replace(block_k=block_k(in_features, config.block_k))
    else:
        config = gpu_config(out_features, in_features, prefill, True)
        if x.dtype is torch.float32 and not prefill:
            config = config._replace(block_n=32)  # wider tiles of fp32 spill registers
        row_tiles = 2 if not prefill and num_tokens > config.block_m else 1
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    _linear_int4_kernel[cdiv(num_tokens, row_tiles * config.block_m), cdiv(out_features, config.block_n)](
        y,
        x,
        weight.packed,
        weight.scales,
        weight.minimums,
        bias,
        num_tokens,
        out_features,
        in_features,
        group,
        RUN,
        config.rows,
        config.width,
        row_tiles,
        config.block_m,
        config.block_n,
        config.block_k,
        **options,
    )


TYPICAL = {"in_features": 4096, "out_features": 4096, "has_bias": 0, "group_kind": 2, "has_minimums": 1}
TYPICAL |= {"exact_scales": 0}


@op(
    reference=linear_int4_reference,
    sample=linear_int4_sample,
    cost=linear_int4_cost,
    typical={"num_tokens": 16, **TYPICAL},
)
def linear_int4(y: Tensor, x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> None:
    """y = x weight^T + bias for the rows of a decode batch; a row's bits do not depend on the others."""
    _launch(y, x, weight, bias)


@op(
    reference=lm_head_int4_reference,
    sample=lm_head_int4_sample,
    cost=lm_head_int4_cost,
    typical={
        "num_tokens": 16,
        "in_features": 4096,
        "out_features": 32000,
        "group_kind": 2,
        "has_minimums": 1,
        "exact_scales": 0,
    },
)
def lm_head_int4(y: Tensor, x: Tensor, weight: Int4Weight) -> None:
    """y = x weight^T as `linear_int4`, kept in fp32: logits."""
    _launch(y, x, weight, None)


@op(
    reference=linear_int4_prefill_reference,
    sample=linear_int4_sample,
    cost=linear_int4_cost,
    typical={"num_tokens": 2048, **TYPICAL},
)
def linear_int4_prefill(y: Tensor, x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> None:
    """y = x weight^T + bias for many rows. On the CPU its bits are those of `linear_int4`."""
    _launch(y, x, weight, bias, prefill=True)
