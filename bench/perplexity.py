"""Perplexity of a fixed text through lychee's own forward pass: prefill batches over the paged KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lychee.models.batch import Batch
from lychee.models.kv_cache import KVCache
from lychee.models.llama import Llama
from lychee.models.tokenizer import Tokenizer

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Windows:
    """Equal stretches of a text, each read from its own beginning. `skipped`: tokens at the start that are given."""

    tokens: tuple[tuple[int, ...], ...]
    skipped: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, text: str, size: int, most: int | None) -> Windows:
        """Evenly spread over the text where there are more than `most`; what does not fill a window is left out."""
        bos = (tokenizer.bos_id,) if tokenizer.add_bos and tokenizer.bos_id is not None else ()
        ids, step = tokenizer.encode(text, add_bos=False), size - len(bos)
        starts = list(range(0, len(ids) - step + 1, step))
        if most is not None and most < len(starts):
            starts = [starts[i * len(starts) // most] for i in range(most)]
        return cls(tuple((*bos, *ids[start : start + step]) for start in starts), max(len(bos), 1))

    @property
    def num_predicted(self) -> int:
        return sum(len(window) - self.skipped for window in self.tokens)


def losses(model: Llama, windows: Windows, kv_dtype: torch.dtype | None, device: torch.device) -> list[float]:
    """Mean negative log likelihood of each window's tokens, given those before them. `kv_dtype` None is the model's."""
    num_blocks = -(-max(map(len, windows.tokens)) // BLOCK_SIZE)
    kv = KVCache.allocate(model.config, num_blocks, BLOCK_SIZE, kv_dtype or model.weights.dtype, device)
    return [_loss(model, kv, window, windows.skipped, device) for window in windows.tokens]


def _loss(model: Llama, kv: KVCache, window: Sequence[int], skipped: int, device: torch.device) -> float:
    rows = list(range(skipped - 1, len(window) - 1))
    batch = Batch.prefill([window], [0], [list(range(kv.num_blocks))], BLOCK_SIZE, device, rows)
    following = torch.tensor(window[skipped:], device=device)
    return float(torch.nn.functional.cross_entropy(model.forward(batch, kv), following))


def perplexity(window_losses: Sequence[float]) -> float:
    return math.exp(sum(window_losses) / len(window_losses))
