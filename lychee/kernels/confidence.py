"""How sure a model is of its next token: the largest probability of its unprocessed softmax."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import triton.language as tl
from torch import Tensor

from .kernel import kernel
from .op import op
from .types import F32, NEVER, Cost, Logits, Spec

BLOCK_V = 2048
LEAST = -3.0e38  # below any finite logit, so that no difference from it is NaN
Confidence = Annotated[Tensor, Spec("num_rows", F32, "probability")]


def confidence_reference(logits: Logits, vocab: int) -> Confidence:
    return logits[:, :vocab].softmax(-1).amax(-1)


def confidence_sample(dtype: torch.dtype, device: str, *, num_rows: int, vocab: int, padding: int) -> dict[str, Any]:
    logits = torch.randn(num_rows, vocab + padding, device=device) * 4
    logits[torch.rand(num_rows, vocab + padding, device=device) < 0.3] = NEVER
    logits[:, 0] = 1.0
    return {"logits": logits, "vocab": vocab}


def confidence_cost(logits: Tensor, vocab: int) -> Cost:
    return Cost(flops=4 * len(logits) * vocab, bytes=4 * len(logits) * vocab)


@kernel
def _confidence_kernel(
    confidence_ptr,  # [num_rows]
    logits_ptr,  # [num_rows, model_vocab]
    vocab,
    model_vocab,
    LEAST: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_v = tl.arange(0, BLOCK_V)
    most = tl.full((), LEAST, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, vocab, BLOCK_V):
        ids = start + offs_v
        logits = tl.load(logits_ptr + row * model_vocab + ids, mask=ids < vocab, other=float("-inf"))
        higher = tl.maximum(most, tl.max(logits, axis=0))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(logits - higher), axis=0)
        most = higher
    tl.store(confidence_ptr + row, 1.0 / total)


@op(
    reference=confidence_reference,
    sample=confidence_sample,
    cost=confidence_cost,
    typical={"num_rows": 4, "vocab": 32000, "padding": 0},
)
def confidence(confidence: Tensor, logits: Tensor, vocab: int) -> None:
    """confidence[r] = max(softmax(logits[r, :vocab])); ids from `vocab` on are padding."""
    num_rows, model_vocab = logits.shape
    _confidence_kernel[(num_rows,)](confidence, logits, vocab, model_vocab, LEAST=LEAST, BLOCK_V=BLOCK_V, num_warps=8)
