"""Token embedding: one row of the table per token."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from .kernel import kernel
from .op import op
from .sizes import cdiv
from .types import Cost, EmbedTable, Hidden, TokenIds


def embed_reference(tokens: TokenIds, table: EmbedTable) -> Hidden:
    dead = (tokens < 0).unsqueeze(-1)
    return F.embedding(tokens.clamp(min=0), table).masked_fill(dead, 0.0)


def embed_sample(dtype: torch.dtype, device: str, *, num_tokens: int, model_vocab: int, hidden: int) -> dict[str, Any]:
    tokens = torch.randint(-1, model_vocab, (num_tokens,), dtype=torch.int32, device=device)
    return {"tokens": tokens, "table": torch.randn(model_vocab, hidden, dtype=dtype, device=device)}


def embed_cost(tokens: Tensor, table: Tensor) -> Cost:
    return Cost(flops=0, bytes=4 * tokens.numel() + 2 * tokens.numel() * table.shape[1] * table.element_size())


@kernel
def _embed_kernel(
    y_ptr,  # [num_tokens, hidden]
    tokens_ptr,  # [num_tokens]
    table_ptr,  # [model_vocab, hidden]
    hidden,
    BLOCK_H: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < hidden
    token = tl.load(tokens_ptr + row).to(tl.int64)
    x = tl.load(table_ptr + token * hidden + offs_h, mask=mask_h & (token >= 0), other=0.0)
    tl.store(y_ptr + row * hidden + offs_h, x, mask=mask_h)


@op(
    reference=embed_reference,
    sample=embed_sample,
    cost=embed_cost,
    typical={"num_tokens": 16, "model_vocab": 32000, "hidden": 4096},
)
def embed(y: Tensor, tokens: Tensor, table: Tensor) -> None:
    """y[i] = table[tokens[i]], ids below model_vocab; token -1 (a dead node) gives zeros."""
    num_tokens, hidden = y.shape
    BLOCK_H = 1024
    _embed_kernel[(num_tokens, cdiv(hidden, BLOCK_H))](y, tokens, table, hidden, BLOCK_H=BLOCK_H)
