"""SwiGLU gate (arXiv:2002.05202): silu(gate) * up, in fp32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from .kernel import kernel
from .op import op
from .sizes import cdiv, runs_on_cpu
from .types import Cost, Intermediate


def swiglu_reference(gate: Intermediate, up: Intermediate) -> Intermediate:
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def swiglu_sample(dtype: torch.dtype, device: str, *, num_tokens: int, intermediate: int) -> dict[str, Any]:
    shape = (num_tokens, intermediate)
    return {name: torch.randn(shape, dtype=dtype, device=device) for name in ("gate", "up")}


def swiglu_cost(gate: Tensor, up: Tensor) -> Cost:
    return Cost(flops=5 * gate.numel(), bytes=3 * gate.numel() * gate.element_size())


@kernel
def _swiglu_kernel(
    y_ptr,  # [numel]
    gate_ptr,  # [numel]
    up_ptr,  # [numel]
    numel,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < numel
    gate = tl.load(gate_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, gate / (1.0 + tl.exp(-gate)) * up, mask=mask)


@op(
    reference=swiglu_reference,
    sample=swiglu_sample,
    cost=swiglu_cost,
    typical={"num_tokens": 16, "intermediate": 11008},
)
def swiglu(y: Tensor, gate: Tensor, up: Tensor) -> None:
    """y = gate * sigmoid(gate) * up, element by element; rounded once at the end."""
    BLOCK, numel = 256 if runs_on_cpu(gate) else 1024, gate.numel()
    _swiglu_kernel[(cdiv(numel, BLOCK),)](y, gate, up, numel, BLOCK=BLOCK)
