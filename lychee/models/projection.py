"""Weights in any format they come in, and which op reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from lychee.kernels import (
    embed,
    embed_int4,
    embed_int8,
    linear,
    linear_int4,
    linear_int4_prefill,
    linear_int8,
    linear_int8_prefill,
    linear_prefill,
    lm_head,
    lm_head_int4,
    lm_head_int8,
)
from lychee.kernels.types import Bias, Hidden, HiddenScale, Int4Weight, Int8Weight, Logits, TokenIds

AnyWeight = Tensor | Int8Weight | Int4Weight
# Of each format: the product for decode batches, that for chunks of prompts, the one that gives logits.
OPS: dict[type, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    Tensor: (linear, linear_prefill, lm_head),
    Int8Weight: (linear_int8, linear_int8_prefill, lm_head_int8),
    Int4Weight: (linear_int4, linear_int4_prefill, lm_head_int4),
}


@dataclass(frozen=True)
class Projection:
    """y = x @ weight.T + bias."""

    weight: AnyWeight
    bias: Bias | None = None

    def __call__(self, x: Hidden, decode: bool) -> Tensor:
        """x [num_tokens, in_features] to [num_tokens, out_features], through the decode-class op or prefill's."""
        op = OPS[type(self.weight)][0 if decode else 1]
        return op(x, self.weight, self.bias)  # type: ignore[no-any-return]


def logits_of(x: Hidden, head: AnyWeight) -> Logits:
    """fp32 x @ head.T."""
    return OPS[type(head)][2](x, head)  # type: ignore[no-any-return]


def embedded(tokens: TokenIds, table: AnyWeight, like: HiddenScale) -> Hidden:
    """Rows of the table; zeros for token -1. `like` has their width and dtype."""
    if isinstance(table, Tensor):
        return embed(tokens, table)
    if isinstance(table, Int8Weight):
        return embed_int8(tokens, table, like)
    return embed_int4(tokens, table, like)


def parts(weight: AnyWeight) -> list[Tensor]:
    """The tensors that a weight is made of."""
    if isinstance(weight, Tensor):
        return [weight]
    return [part for f in fields(weight) if (part := getattr(weight, f.name)) is not None]


def moved(weight: AnyWeight, device: torch.device | str, dtype: torch.dtype) -> AnyWeight:
    """A copy on the device. `dtype` is for dense weights: quantised ones stay what they are.

    Of those the CPU has fp32 scales: a product reads them as they are, where it would convert fp16 ones again for every
    block, which doubles an int4 product's time.
    """
    if isinstance(weight, Tensor):
        return weight.to(device=device, dtype=dtype, copy=True)
    scales = {torch.float16: torch.float32} if torch.device(device).type == "cpu" else {}
    return _each(weight, lambda part: part.to(device=device, dtype=scales.get(part.dtype, part.dtype), copy=True))


def rows_of(weight: AnyWeight, rows: Tensor) -> AnyWeight:
    """The weight with these of its rows alone, [len(rows)] int64."""
    if isinstance(weight, Tensor):
        return weight[rows].contiguous()
    return _each(weight, lambda part: part[rows].contiguous())


def _each(weight: Int8Weight | Int4Weight, change: Callable[[Tensor], Tensor]) -> Int8Weight | Int4Weight:
    made = {f.name: None if (part := getattr(weight, f.name)) is None else change(part) for f in fields(weight)}
    return type(weight)(**made)  # type: ignore[arg-type]
