"""Token arrays cut into batches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

CONTEXT = 512
ROWS = 8
"""Windows of ``CONTEXT`` tokens in a batch; early in training each is cut in two, which is faster."""
Batches = Callable[[int], tuple[Tensor, Tensor]]


def batches(data: dict[str, np.ndarray], mix: dict[str, float], seed: int) -> Batches:
    """A function from step to batch (inputs, targets): shuffled windows, none twice before all were seen."""
    rng = np.random.default_rng(seed)
    pattern = rng.permutation([kind for kind, share in mix.items() for _ in range(round(share * 100))])
    orders: dict[tuple[str, int], np.ndarray] = {}

    def window(index: int) -> np.ndarray:
        turn, place = divmod(index, len(pattern))
        kind = str(pattern[place])
        count = turn * int((pattern == kind).sum()) + int((pattern[:place] == kind).sum())
        ids = data[kind]
        epoch, at = divmod(count, (len(ids) - CONTEXT - 1) // CONTEXT)
        if (kind, epoch) not in orders:
            shuffle = np.random.default_rng([seed, list(mix).index(kind), epoch])
            first = shuffle.integers(CONTEXT)
            orders[kind, epoch] = shuffle.permutation(np.arange(first, len(ids) - CONTEXT, CONTEXT))
        start = orders[kind, epoch][at]
        return ids[start : start + CONTEXT + 1]

    def batch(step: int) -> tuple[Tensor, Tensor]:
        ids = torch.from_numpy(np.stack([window(step * ROWS + row) for row in range(ROWS)]).astype(np.int64))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return batch


def held_windows(ids: np.ndarray, count: int) -> Tensor:
    """``count`` windows spread evenly through held-out text, each of ``CONTEXT`` tokens and the one after."""
    starts = np.linspace(0, len(ids) - CONTEXT - 1, count).astype(int)
    return torch.from_numpy(np.stack([ids[s : s + CONTEXT + 1] for s in starts]).astype(np.int64))
