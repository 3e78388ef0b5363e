"""RMS normalisation (arXiv:1910.07467), alone and after a residual addition. Statistics in fp32."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from .kernel import kernel
from .op import op
from .sizes import next_power_of_2
from .types import Cost, Hidden, HiddenScale


def rms_norm_reference(x: Hidden, weight: HiddenScale, eps: float) -> Hidden:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rms_norm_sample(dtype: torch.dtype, device: str, *, num_tokens: int, hidden: int) -> dict[str, Any]:
    x = torch.randn(num_tokens, hidden, dtype=dtype, device=device)
    return {"x": x, "weight": torch.randn(hidden, dtype=dtype, device=device), "eps": 1e-6}


def rms_norm_cost(x: Tensor, weight: Tensor, eps: float) -> Cost:
    return Cost(flops=4 * x.numel(), bytes=(2 * x.numel() + weight.numel()) * x.element_size())


@kernel
def _rms_norm_kernel(
    y_ptr,  # [num_tokens, hidden]
    x_ptr,  # [num_tokens, hidden]
    weight_ptr,  # [hidden]
    hidden,
    eps,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offs_h = tl.arange(0, BLOCK_H)
    mask_h = offs_h < hidden
    x = tl.load(x_ptr + token * hidden + offs_h, mask=mask_h, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + offs_h, mask=mask_h, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
    tl.store(y_ptr + token * hidden + offs_h, x * rstd * weight, mask=mask_h)


@op(
    reference=rms_norm_reference,
    sample=rms_norm_sample,
    cost=rms_norm_cost,
    typical={"num_tokens": 16, "hidden": 4096},
)
def rms_norm(y: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """y = x / sqrt(mean(x^2) + eps) * weight; statistics in fp32. One program per token, its row in registers."""
    num_tokens, hidden = x.shape
    _rms_norm_kernel[(num_tokens,)](y, x, weight, hidden, eps, BLOCK_H=next_power_of_2(hidden))


def add_rms_norm_reference(x: Hidden, residual: Hidden, weight: HiddenScale, eps: float) -> tuple[Hidden, Hidden]:
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


def add_rms_norm_sample(dtype: torch.dtype, device: str, *, num_tokens: int, hidden: int) -> dict[str, Any]:
    inputs = rms_norm_sample(dtype, device, num_tokens=num_tokens, hidden=hidden)
    return {**inputs, "residual": torch.randn(num_tokens, hidden, dtype=dtype, device=device)}


def add_rms_norm_cost(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Cost:
    return Cost(flops=5 * x.numel(), bytes=(4 * x.numel() + weight.numel()) * x.element_size())


@kernel
def _add_rms_norm_kernel(
    y_ptr,  # [num_tokens, hidden]
    total_ptr,  # [num_tokens, hidden]
    x_ptr,  # [num_tokens, hidden]
    residual_ptr,  # [num_tokens, hidden]
    weight_ptr,  # [hidden]
    hidden,
    eps,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offs_h = tl.arange(0, BLOCK_H)
    mask_h = offs_h < hidden
    x = tl.load(x_ptr + token * hidden + offs_h, mask=mask_h, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + token * hidden + offs_h, mask=mask_h, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + offs_h, mask=mask_h, other=0.0).to(tl.float32)
    rounded = (x + residual).to(total_ptr.dtype.element_ty)
    total = rounded.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(total * total, axis=0) / hidden + eps)
    tl.store(total_ptr + token * hidden + offs_h, rounded, mask=mask_h)
    tl.store(y_ptr + token * hidden + offs_h, total * rstd * weight, mask=mask_h)


@op(
    reference=add_rms_norm_reference,
    sample=add_rms_norm_sample,
    cost=add_rms_norm_cost,
    typical={"num_tokens": 16, "hidden": 4096},
)
def add_rms_norm(y: Tensor, total: Tensor, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """total = x + residual, rounded to its dtype; y = rms_norm(total), of the rounded values as if two calls."""
    num_tokens, hidden = x.shape
    _add_rms_norm_kernel[(num_tokens,)](y, total, x, residual, weight, hidden, eps, BLOCK_H=next_power_of_2(hidden))
