"""Linear layers of the decode class (few rows, any number of them, each row's result independent of the others).

The language-model head is one whose logits stay in fp32, as all sums are.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from . import sizes
from .kernel import kernel
from .op import op
from .sizes import cdiv
from .types import Bias, Cost, Features, Projected, ProjectedF32, Weight

CPU_EXACT = 9  # rows up to which the CPU has a kernel for each number
BLOCK_M = 16  # rows of a decode tile: the narrowest token operand that every tensor-core shape takes


class Config(NamedTuple):
    """Tile sizes of one launch. A row's sum depends on block_k alone, and that on the weight: never on its batch."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    rows: int = 0  # the number of rows that the kernel is compiled for; 0: any
    width: int = 0  # in_features, likewise


def decode_config(out_features: int, dtype: torch.dtype) -> Config:
    """Weight tiles narrow enough that small layers still occupy every multiprocessor."""
    if dtype is torch.float32:
        return Config(BLOCK_M, 32, 64, num_warps=4, num_stages=3)
    if out_features >= 8192:
        return Config(BLOCK_M, 64, 64, num_warps=4, num_stages=6)
    return Config(BLOCK_M, 32 if out_features >= 4096 else 16, 128, num_warps=4, num_stages=4)


@cache
def cpu_config(num_tokens: int, out_features: int, in_features: int, prefill: bool = False) -> Config:
    """Up to 16 rows in one tile, so that weights stream once; block_k divides in_features if it can.

    Up to CPU_EXACT rows, what most rounds verify, have a kernel for each number: blocks then have as many, and rows lie
    at known distances. More go by tiles of 16, and weights are read anew for each, from a cache. A kernel has to be
    compiled, so there is one for all prefills.
    """
    exact = num_tokens <= CPU_EXACT and not prefill
    block_m = next(size for size in (1, 2, 4, 8, 16) if size >= num_tokens) if exact else 16
    block_k = max(64, min(256, in_features & -in_features))
    width = 0 if in_features % block_k else in_features
    rows = num_tokens if width and exact else 0
    return Config(block_m, 16 if out_features < 1024 else 32, block_k, 1, 1, rows, width)


def linear_reference(x: Features, weight: Weight, bias: Bias | None = None) -> Projected:
    return F.linear(x, weight, bias)


def lm_head_reference(x: Features, weight: Weight) -> ProjectedF32:
    return F.linear(x.float(), weight.float())


def lm_head_sample(
    dtype: torch.dtype, device: str, *, num_tokens: int, in_features: int, out_features: int
) -> dict[str, Any]:
    x = torch.randn(num_tokens, in_features, dtype=dtype, device=device)
    weight = torch.randn(out_features, in_features, dtype=dtype, device=device).mul_(in_features**-0.5)
    return {"x": x, "weight": weight}


def linear_sample(
    dtype: torch.dtype, device: str, *, num_tokens: int, in_features: int, out_features: int, has_bias: int
) -> dict[str, Any]:
    inputs = lm_head_sample(dtype, device, num_tokens=num_tokens, in_features=in_features, out_features=out_features)
    return {**inputs, "bias": torch.randn(out_features, dtype=dtype, device=device) if has_bias else None}


def linear_cost(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Cost:
    (num_tokens, in_features), out_features = x.shape, weight.shape[0]
    elements = x.numel() + weight.numel() + num_tokens * out_features + (0 if bias is None else bias.numel())
    return Cost(flops=2 * num_tokens * in_features * out_features, bytes=elements * x.element_size())


def lm_head_cost(x: Tensor, weight: Tensor) -> Cost:
    (num_tokens, in_features), out_features = x.shape, weight.shape[0]
    moved = (x.numel() + weight.numel()) * x.element_size() + 4 * num_tokens * out_features
    return Cost(flops=2 * num_tokens * in_features * out_features, bytes=moved)


@triton.jit
def widened(scales, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, PER_GROUP: tl.constexpr):
    """[BLOCK_N, GROUPS] with every column PER_GROUP times."""
    return tl.reshape(tl.broadcast_to(scales[:, :, None], (BLOCK_N, GROUPS, PER_GROUP)), (BLOCK_N, GROUPS * PER_GROUP))


@triton.jit
def weight_tile(
    weight_ptr,
    scales_ptr,
    offs_n,
    mask_n,
    start,
    in_features,
    DTYPE: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_N, BLOCK_K] in DTYPE. Scales of groups are applied, and BLOCK_K then divides in_features, as for WHOLE."""
    offs_k = start + tl.arange(0, BLOCK_K)
    at = weight_ptr + offs_n[:, None] * in_features + offs_k[None, :]
    if GROUP == 0:
        mask = mask_n[:, None] if WHOLE else mask_n[:, None] & (offs_k < in_features)[None, :]
        weight = tl.load(at, mask=mask, other=0)
    else:
        offs_g = start // GROUP + tl.arange(0, BLOCK_K // GROUP)
        scales_at = scales_ptr + offs_n[:, None] * (in_features // GROUP) + offs_g[None, :]
        scales = tl.load(scales_at, mask=mask_n[:, None], other=0.0).to(tl.float32)
        weight = tl.load(at, mask=mask_n[:, None], other=0).to(tl.float32)
        weight = weight * widened(scales, BLOCK_N, BLOCK_K // GROUP, GROUP)
    return weight.to(DTYPE)


@triton.jit
def dot_tile(
    acc,
    weight,
    x_ptr,
    tile,
    num_tokens,
    in_features,
    start,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """acc [BLOCK_N, BLOCK_M] plus weight [BLOCK_N, BLOCK_K] times one row tile's features, transposed."""
    offs_m = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = start + tl.arange(0, BLOCK_K)
    mask = (offs_m < num_tokens)[None, :]
    if not WHOLE:
        mask = mask & (offs_k < in_features)[:, None]
    x = tl.load(x_ptr + offs_m[None, :] * in_features + offs_k[:, None], mask=mask, other=0.0)
    return tl.dot(weight, x, acc, input_precision="ieee")


@triton.jit
def store_tile(y_ptr, acc, bias, tile, offs_n, num_tokens, out_features, BLOCK_M: tl.constexpr):
    offs_m = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = (offs_m < num_tokens)[None, :] & (offs_n < out_features)[:, None]
    tl.store(y_ptr + offs_m[None, :] * out_features + offs_n[:, None], acc + bias[:, None], mask=mask)


@kernel(do_not_specialize=["num_tokens"])
def linear_kernel(
    y_ptr,  # [num_tokens, out_features]
    x_ptr,  # [num_tokens, in_features]
    weight_ptr,  # [out_features, in_features]
    scales_ptr,  # of int8 weights, [out_features, in_features / GROUP], or [out_features] for GROUP 0; else None
    bias_ptr,  # [out_features] or None
    num_tokens,
    out_features,
    in_features,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # num_tokens, where the kernel is compiled for that many; else 0
    WIDTH: tl.constexpr,  # in_features, where it is compiled for that many and BLOCK_K divides them; else 0
    ROW_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Row tiles are the fastest grid axis: programs that share weights run together and the weights leave memory once.
    tile = tl.program_id(0) * ROW_TILES
    if ROWS > 0:
        tile, num_tokens = tl.full((), 0, tl.int32), ROWS
    if WIDTH > 0:
        in_features = WIDTH
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < out_features
    acc_0 = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    acc_1 = acc_0
    acc_2 = acc_0
    acc_3 = acc_0
    for start in range(0, in_features, BLOCK_K):
        # The weight is the A operand: its many rows fill the tensor core, the few tokens are the narrow side. Tokens go
        # by dots of one shape, whatever their number, so that a row is summed alike in any batch.
        dtype = x_ptr.dtype.element_ty
        weight = weight_tile(
            weight_ptr, scales_ptr, offs_n, mask_n, start, in_features, dtype, GROUP, WIDTH > 0, BLOCK_N, BLOCK_K
        )
        acc_0 = dot_tile(acc_0, weight, x_ptr, tile, num_tokens, in_features, start, WIDTH > 0, BLOCK_M, BLOCK_K)
        if ROW_TILES > 1:
            acc_1 = dot_tile(
                acc_1, weight, x_ptr, tile + 1, num_tokens, in_features, start, WIDTH > 0, BLOCK_M, BLOCK_K
            )
        if ROW_TILES > 2:
            acc_2 = dot_tile(
                acc_2, weight, x_ptr, tile + 2, num_tokens, in_features, start, WIDTH > 0, BLOCK_M, BLOCK_K
            )
            acc_3 = dot_tile(
                acc_3, weight, x_ptr, tile + 3, num_tokens, in_features, start, WIDTH > 0, BLOCK_M, BLOCK_K
            )
    bias = tl.zeros((BLOCK_N,), dtype=tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    if GROUP == 0 and scales_ptr is not None:  # a scale per row multiplies the sums
        scale = tl.load(scales_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
        acc_0 *= scale
        acc_1 *= scale
        acc_2 *= scale
        acc_3 *= scale
    store_tile(y_ptr, acc_0, bias, tile, offs_n, num_tokens, out_features, BLOCK_M)
    if ROW_TILES > 1:
        store_tile(y_ptr, acc_1, bias, tile + 1, offs_n, num_tokens, out_features, BLOCK_M)
    if ROW_TILES > 2:
        store_tile(y_ptr, acc_2, bias, tile + 2, offs_n, num_tokens, out_features, BLOCK_M)
        store_tile(y_ptr, acc_3, bias, tile + 3, offs_n, num_tokens, out_features, BLOCK_M)


def launch_decode(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, prefill: bool = False) -> None:
    (num_tokens, in_features), out_features = x.shape, weight.shape[0]
    if sizes.runs_on_cpu(x):
        config, row_tiles, options = cpu_config(num_tokens, out_features, in_features, prefill), 1, {}
    else:
        config = decode_config(out_features, weight.dtype)
        row_tiles = 1 if num_tokens <= config.block_m else 2 if num_tokens <= 2 * config.block_m else 4
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    linear_kernel[cdiv(num_tokens, row_tiles * config.block_m), cdiv(out_features, config.block_n)](
        y,
        x,
        weight,
        None,
        bias,
        num_tokens,
        out_features,
        in_features,
        0,
        config.rows,
        config.width,
        row_tiles,
        config.block_m,
        config.block_n,
        config.block_k,
        **options,
    )


@op(
    reference=linear_reference,
    sample=linear_sample,
    cost=linear_cost,
    typical={"num_tokens": 16, "in_features": 4096, "out_features": 4096, "has_bias": 0},
)
def linear(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """y = x weight^T + bias for the rows of a decode batch, summed in fp32 in one order of in_features.

    A row's bits do not depend on the number of rows or on its place among them: the order of its sum depends on the
    weight alone.
    """
    launch_decode(y, x, weight, bias)


@op(
    reference=lm_head_reference,
    sample=lm_head_sample,
    cost=lm_head_cost,
    typical={"num_tokens": 16, "in_features": 4096, "out_features": 32000},
)
def lm_head(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """y = x weight^T as `linear`, kept in fp32: logits."""
    launch_decode(y, x, weight, None)
