"""Linear layers for many rows, in square tiles."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from . import sizes
from .kernel import kernel
from .linear import Config, launch_decode, linear_cost, linear_sample
from .op import op
from .sizes import cdiv
from .types import Bias, Features, Projected, Weight


def prefill_config(dtype: torch.dtype) -> Config:
    if dtype is torch.float32:
        return Config(64, 64, 16, num_warps=4, num_stages=3)
    return Config(128, 128, 64, num_warps=8, num_stages=3)


def linear_prefill_reference(x: Features, weight: Weight, bias: Bias | None = None) -> Projected:
    return F.linear(x, weight, bias)


@kernel
def _linear_prefill_kernel(
    y_ptr,  # [num_tokens, out_features]
    x_ptr,  # [num_tokens, in_features]
    weight_ptr,  # [out_features, in_features]
    bias_ptr,  # [out_features] or None
    num_tokens,
    out_features,
    in_features,
    GROUP_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Programs sweep all row tiles of GROUP_N column tiles before the next group, so the group's weights stay in L2.
    tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    tiles_n = tl.cdiv(out_features, BLOCK_N)
    group = tl.program_id(0) // (tiles_m * GROUP_N)
    width = min(tiles_n - group * GROUP_N, GROUP_N)
    within = tl.program_id(0) % (tiles_m * GROUP_N)
    offs_m = (within // width).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (group * GROUP_N + within % width).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = offs_m < num_tokens
    mask_n = offs_n < out_features
    x_ptrs = x_ptr + offs_m[:, None] * in_features + offs_k[None, :]
    weight_ptrs = weight_ptr + offs_n[None, :] * in_features + offs_k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, in_features, BLOCK_K):
        mask_k = offs_k < in_features - start
        x = tl.load(x_ptrs + start, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        weight = tl.load(weight_ptrs + start, mask=mask_n[None, :] & mask_k[:, None], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + offs_m[:, None] * out_features + offs_n[None, :]
    tl.store(y_ptrs, acc, mask=mask_m[:, None] & mask_n[None, :])


@op(
    reference=linear_prefill_reference,
    sample=linear_sample,
    cost=linear_cost,
    typical={"num_tokens": 2048, "in_features": 4096, "out_features": 4096, "has_bias": 0},
)
def linear_prefill(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """y = x weight^T + bias for many rows, in square tiles; a row's bits do not depend on the other rows.

    On the CPU they are those of `linear`.
    """
    if sizes.runs_on_cpu(x):
        launch_decode(y, x, weight, bias, prefill=True)
        return
    (num_tokens, in_features), out_features = x.shape, weight.shape[0]
    config = prefill_config(weight.dtype)
    grid = (cdiv(num_tokens, config.block_m) * cdiv(out_features, config.block_n),)
    _linear_prefill_kernel[grid](
        y,
        x,
        weight,
        bias,
        num_tokens,
        out_features,
        in_features,
        GROUP_N=8,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
