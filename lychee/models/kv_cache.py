"""Storage of the paged KV cache of one model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lychee.kernels import types
from lychee.kernels.kv_int8 import cache_width

from .config import ModelConfig


@dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers; block b is slots b * block_size up to (b + 1) * block_size.

    Of a float dtype, or int8 with a scale per slot and head in the storage itself (`kernels/kv_int8.py`).
    """

    storage: types.KVStorageWritten
    block_size: int

    @classmethod
    def allocate(
        cls, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> KVCache:
        width = cache_width(config.num_kv_heads, config.head_dim, dtype)
        shape = (config.num_layers, 2, num_blocks * block_size, config.num_kv_heads, width)
        # Left unwritten: what no sequence has stored is never read, and on the CPU not even given memory.
        return cls(torch.empty(shape, dtype=dtype, device=device), block_size)

    @staticmethod
    def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Memory of one block, all layers."""
        width = cache_width(config.num_kv_heads, config.head_dim, dtype)
        return 2 * config.num_layers * block_size * config.num_kv_heads * width * dtype.itemsize

    def copy_block(self, source: int, destination: int) -> None:
        """Keys and values of all layers and slots of a block."""
        start, to = source * self.block_size, destination * self.block_size
        self.storage[:, :, to : to + self.block_size] = self.storage[:, :, start : start + self.block_size]

    @property
    def num_blocks(self) -> int:
        return self.storage.shape[2] // self.block_size

    @cached_property
    def layers(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Each layer's keys and values, as views."""
        return tuple((layer[0], layer[1]) for layer in self.storage)
