"""The tokens of a tree level's rows, from among all that were drawn for their parents."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import triton.language as tl
from torch import Tensor

from .kernel import kernel
from .op import op
from .sizes import cdiv
from .types import I32, Cost, Draws, Spec, TokenIds

BLOCK = 128
TokenFrom = Annotated[Tensor, Spec("num_tokens", I32, "which of the draws, counted row by row")]


def take_tokens_reference(draws: Draws, token_from: TokenFrom) -> TokenIds:
    return draws.flatten()[token_from]


def take_tokens_sample(
    dtype: torch.dtype, device: str, *, num_rows: int, num_samples: int, num_tokens: int
) -> dict[str, Any]:
    draws = torch.randint(-1, 2**31 - 1, (num_rows, num_samples), dtype=torch.int32, device=device)
    return {
        "draws": draws,
        "token_from": torch.randint(0, draws.numel(), (num_tokens,), dtype=torch.int32, device=device),
    }


def take_tokens_cost(draws: Tensor, token_from: Tensor) -> Cost:
    return Cost(flops=0, bytes=12 * len(token_from))


@kernel
def _take_kernel(
    tokens_ptr,  # [num_tokens]
    draws_ptr,  # [num_rows * num_samples]
    token_from_ptr,  # [num_tokens]
    num_tokens,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_tokens
    at = tl.load(token_from_ptr + offs, mask=mask, other=0)
    tl.store(tokens_ptr + offs, tl.load(draws_ptr + at, mask=mask, other=-1), mask=mask)


@op(
    reference=take_tokens_reference,
    sample=take_tokens_sample,
    cost=take_tokens_cost,
    typical={"num_rows": 8, "num_samples": 4, "num_tokens": 16},
)
def take_tokens(tokens: Tensor, draws: Tensor, token_from: Tensor) -> None:
    """tokens[i] = draws[token_from[i] // num_samples, token_from[i] % num_samples]."""
    num_tokens = len(token_from)
    _take_kernel[(cdiv(num_tokens, BLOCK),)](tokens, draws, token_from, num_tokens, BLOCK=BLOCK)
