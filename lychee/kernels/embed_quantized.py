"""Token embedding from quantised tables: one row per token, dequantised."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import triton.language as tl
from torch import Tensor

from .kernel import kernel
from .op import op
from .quantized import RUN, dequantize, group_size, sample_int4, sample_int8
from .sizes import cdiv
from .types import FLOAT, Cost, Features, Int4Weight, Int8Weight, Spec, TokenIds

BLOCK_H = 1024
Like = Annotated[Tensor, Spec("in_features", FLOAT, "gives width and dtype")]


def embed_int8_reference(tokens: TokenIds, table: Int8Weight, like: Like) -> Features:
    return _rows(tokens, dequantize(table)).to(like.dtype)


def embed_int4_reference(tokens: TokenIds, table: Int4Weight, like: Like) -> Features:
    return _rows(tokens, dequantize(table)).to(like.dtype)


def _rows(tokens: Tensor, table: Tensor) -> Tensor:
    return table[tokens.clamp(min=0)].masked_fill((tokens < 0).unsqueeze(-1), 0.0)


def embed_int8_sample(
    dtype: torch.dtype, device: str, *, num_tokens: int, model_vocab: int, hidden: int, grouped: int
) -> dict[str, Any]:
    groups_of = 32 * grouped
    in_features = max(groups_of, hidden - hidden % groups_of) if groups_of else hidden
    tokens = torch.randint(-1, model_vocab, (num_tokens,), dtype=torch.int32, device=device)
    return {
        "tokens": tokens,
        "table": sample_int8(model_vocab, in_features, groups_of, device),
        "like": torch.empty(in_features, dtype=dtype, device=device),
    }


def embed_int4_sample(
    dtype: torch.dtype, device: str, *, num_tokens: int, model_vocab: int, hidden: int, has_minimums: int
) -> dict[str, Any]:
    in_features = max(32, hidden - hidden % 32)
    tokens = torch.randint(-1, model_vocab, (num_tokens,), dtype=torch.int32, device=device)
    table = sample_int4(model_vocab, in_features, 32, has_minimums, 0, device)
    like = torch.empty(in_features, dtype=dtype, device=device)
    return {"tokens": tokens, "table": table, "like": like}


def embed_int8_cost(tokens: Tensor, table: Int8Weight, like: Tensor) -> Cost:
    width = len(like)
    return Cost(flops=tokens.numel() * width, bytes=tokens.numel() * (4 + width + width * like.element_size()))


def embed_int4_cost(tokens: Tensor, table: Int4Weight, like: Tensor) -> Cost:
    width = len(like)
    return Cost(flops=2 * tokens.numel() * width, bytes=tokens.numel() * (4 + width // 2 + width * like.element_size()))


@kernel
def _embed_int8_kernel(
    y_ptr,  # [num_tokens, in_features]
    tokens_ptr,  # [num_tokens]
    values_ptr,  # [vocab, in_features]
    scales_ptr,  # [vocab, in_features / GROUP]
    in_features,
    GROUP,
    BLOCK_H: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < in_features
    token = tl.load(tokens_ptr + row).to(tl.int64)
    mask = mask_h & (token >= 0)
    values = tl.load(values_ptr + token * in_features + offs_h, mask=mask, other=0).to(tl.float32)
    scales = tl.load(scales_ptr + token * (in_features // GROUP) + offs_h // GROUP, mask=mask, other=0.0)
    tl.store(y_ptr + row * in_features + offs_h, values * scales.to(tl.float32), mask=mask_h)


@kernel
def _embed_int4_kernel(
    y_ptr,  # [num_tokens, in_features]
    tokens_ptr,  # [num_tokens]
    packed_ptr,  # [vocab, in_features / 2]
    scales_ptr,  # [vocab, in_features / GROUP]
    minimums_ptr,  # [vocab, in_features / GROUP] or None
    in_features,
    GROUP,
    RUN: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < in_features
    token = tl.load(tokens_ptr + row).to(tl.int64)
    mask = mask_h & (token >= 0)
    at = token * (in_features // 2) + offs_h // (2 * RUN) * RUN + offs_h % RUN
    packed = tl.load(packed_ptr + at, mask=mask, other=0)
    quants = tl.where(offs_h % (2 * RUN) < RUN, packed & 15, packed >> 4)
    group = token * (in_features // GROUP) + offs_h // GROUP
    scales = tl.load(scales_ptr + group, mask=mask, other=0.0).to(tl.float32)
    if minimums_ptr is None:
        x = (quants.to(tl.int8) - 8).to(tl.float32) * scales
    else:
        minimums = tl.load(minimums_ptr + group, mask=mask, other=0.0).to(tl.float32)
        x = tl.fma(quants.to(tl.float32), scales, minimums)
    tl.store(y_ptr + row * in_features + offs_h, x, mask=mask_h)


@op(
    reference=embed_int8_reference,
    sample=embed_int8_sample,
    cost=embed_int8_cost,
    typical={"num_tokens": 16, "model_vocab": 32000, "hidden": 4096, "grouped": 0},
)
def embed_int8(y: Tensor, tokens: Tensor, table: Int8Weight, like: Tensor) -> None:
    """y[i] = table[tokens[i]], ids below the table's rows; token -1 (a dead node) gives zeros."""
    in_features = len(like)
    group = group_size(in_features, table)
    grid = (tokens.shape[0], cdiv(in_features, BLOCK_H))
    _embed_int8_kernel[grid](y, tokens, table.values, table.scales, in_features, group, BLOCK_H=BLOCK_H)


@op(
    reference=embed_int4_reference,
    sample=embed_int4_sample,
    cost=embed_int4_cost,
    typical={"num_tokens": 16, "model_vocab": 32000, "hidden": 4096, "has_minimums": 1},
)
def embed_int4(y: Tensor, tokens: Tensor, table: Int4Weight, like: Tensor) -> None:
    """y[i] = table[tokens[i]], ids below the table's rows; token -1 (a dead node) gives zeros."""
    in_features = len(like)
    group = group_size(in_features, table)
    grid = (tokens.shape[0], cdiv(in_features, BLOCK_H))
    _embed_int4_kernel[grid](
        y, tokens, table.packed, table.scales, table.minimums, in_features, group, RUN=RUN, BLOCK_H=BLOCK_H
    )
