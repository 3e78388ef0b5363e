"""Logits of a head with fewer outputs than the vocabulary, spread over all of it."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import triton.language as tl
from torch import Tensor

from .kernel import kernel
from .op import op
from .sizes import cdiv
from .types import F32, I32, NEVER, Cost, Logits, Spec

BLOCK_V = 4096
OutputLogits = Annotated[Tensor, Spec("num_rows num_outputs", F32)]
OutputOf = Annotated[Tensor, Spec("model_vocab", I32, "output of each token; -1 for those that have none")]


def spread_logits_reference(logits: OutputLogits, output_of: OutputOf) -> Logits:
    return logits[:, output_of.clamp(min=0)].masked_fill(output_of < 0, NEVER).contiguous()


def spread_logits_sample(
    dtype: torch.dtype, device: str, *, num_rows: int, num_outputs: int, model_vocab: int
) -> dict[str, Any]:
    output_of = torch.randint(-1, num_outputs, (model_vocab,), dtype=torch.int32, device=device)
    return {"logits": torch.randn(num_rows, num_outputs, device=device), "output_of": output_of}


def spread_logits_cost(logits: Tensor, output_of: Tensor) -> Cost:
    return Cost(flops=0, bytes=logits.nbytes + output_of.nbytes + 4 * len(logits) * len(output_of))


@kernel
def _spread_kernel(
    y_ptr,  # [num_rows, vocab]
    logits_ptr,  # [num_rows, num_outputs]
    output_of_ptr,  # [vocab]
    num_outputs,
    vocab,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < vocab
    output = tl.load(output_of_ptr + offs_v, mask=mask_v, other=-1)
    logits = tl.load(logits_ptr + row * num_outputs + output, mask=output >= 0, other=float("-inf"))
    tl.store(y_ptr + row * vocab + offs_v, logits, mask=mask_v)


@op(
    reference=spread_logits_reference,
    sample=spread_logits_sample,
    cost=spread_logits_cost,
    typical={"num_rows": 4, "num_outputs": 16384, "model_vocab": 49152},
)
def spread_logits(y: Tensor, logits: Tensor, output_of: Tensor) -> None:
    """y[r, v] = logits[r, output_of[v]], and -inf where there is no output: such tokens are never drawn."""
    (num_rows, num_outputs), vocab = logits.shape, len(output_of)
    _spread_kernel[(cdiv(vocab, BLOCK_V), num_rows)](y, logits, output_of, num_outputs, vocab, BLOCK_V=BLOCK_V)
