"""Philox 4x32-10 in NumPy: what `tl.rand` and `tl.randint` must give, bit for bit."""

import numpy as np
import torch
from torch import Tensor


def bits(seed: int, offsets: Tensor, rounds: int = 10) -> Tensor:
    """The first of the four words for a 32-bit counter, int64 holding unsigned 32-bit values; offsets' shape."""
    counter = [offsets.numpy().astype(np.uint64)] + [np.zeros(offsets.shape, np.uint64) for _ in range(3)]
    low = np.uint64(0xFFFFFFFF)
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64((seed >> 32) & 0xFFFFFFFF)]
    for _ in range(rounds):
        products = np.uint64(0xD2511F53) * counter[0], np.uint64(0xCD9E8D57) * counter[2]
        high = [p >> np.uint64(32) for p in products]
        counter = [high[1] ^ counter[1] ^ key[0], products[1] & low, high[0] ^ counter[3] ^ key[1], products[0] & low]
        key = [(k + np.uint64(step)) & low for k, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)]
    return torch.from_numpy(counter[0].astype(np.int64))


def uniform(seed: int, offsets: Tensor) -> Tensor:
    """`tl.rand`: float32 in [0, 1)."""
    signed = bits(seed, offsets).to(torch.int32)
    return torch.where(signed < 0, -signed - 1, signed).float() * 4.6566127342e-10
