"""RMS normalisation (arXiv:1910.07467), alone and after a residual addition. Statistics in fp32."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .op import op
from .types import Cost, Hidden, HiddenScale


def rms_norm_reference(x: Hidden, weight: HiddenScale, eps: float) -> Hidden:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rms_norm_sample(dtype: torch.dtype, device: str, *, num_tokens: int, hidden: int) -> dict[str, Any]:
    x = torch.randn(num_tokens, hidden, dtype=dtype, device=device)
    return {"x": x, "weight": torch.randn(hidden, dtype=dtype, device=device), "eps": 1e-6}


def rms_norm_cost(x: Tensor, weight: Tensor, eps: float) -> Cost:
    return Cost(flops=4 * x.numel(), bytes=(2 * x.numel() + weight.numel()) * x.element_size())


@triton.jit
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
    _rms_norm_kernel[(num_tokens,)](y, x, weight, hidden, eps, BLOCK_H=triton.next_power_of_2(hidden))
