"""Legal random batches for the samples of ops over the paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .kv_int8 import packed_rows
from .types import Paging


def sample_paging(context_lens: Sequence[int], rows: Sequence[int], tokens: Sequence[int], block_size: int) -> Paging:
    """A batch whose sequences hold `tokens` tokens each, in distinct shuffled blocks; unused entries are -1."""
    num_blocks = [-(-n // block_size) for n in tokens]
    shuffled = torch.randperm(sum(num_blocks) + 1, dtype=torch.int32)
    block_tables = torch.full((len(tokens), max(num_blocks)), -1, dtype=torch.int32)
    for seq, blocks in enumerate(shuffled.split([*num_blocks, 1])[:-1]):
        block_tables[seq, : len(blocks)] = blocks
    cu_seqlens_q = torch.tensor([0, *rows]).cumsum(0, dtype=torch.int32)
    seq_idx = torch.arange(len(rows), dtype=torch.int32).repeat_interleave(torch.tensor(rows))
    contexts = torch.tensor(context_lens, dtype=torch.int32)
    return Paging(cu_seqlens_q, seq_idx, contexts, block_tables, block_size, max(rows), max(context_lens))


def sample_caches(
    used_slots: Tensor, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str, int8: int = 0
) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer, NaN wherever nothing is stored: of int8 all bits, which makes the scales NaN."""
    rows = torch.randn(2, len(used_slots), num_kv_heads, head_dim, dtype=dtype)
    if int8:
        packed = [packed_rows(x) for x in rows]
        caches = torch.full((2, int(used_slots.max()) + 2, *packed[0].shape[1:]), -1, dtype=torch.int8)
        caches[:, used_slots] = torch.stack(packed)
    else:
        caches = torch.full((2, int(used_slots.max()) + 2, num_kv_heads, head_dim), float("nan"), dtype=dtype)
        caches[:, used_slots] = rows
    k_cache, v_cache = caches.to(device)
    return k_cache, v_cache


def paging_to(paging: Paging, device: str) -> Paging:
    """The same paging with its tensors on `device`."""
    return replace(
        paging,
        cu_seqlens_q=paging.cu_seqlens_q.to(device),
        seq_idx=paging.seq_idx.to(device),
        context_lens=paging.context_lens.to(device),
        block_tables=paging.block_tables.to(device),
    )


def sample_tree(num_nodes: int) -> list[list[int]]:
    """Paths, root first, of a random tree's living nodes; about a fifth of the nodes are dead, with all below them."""
    paths = {0: [0]}
    for node in range(1, num_nodes):
        parent = int(torch.randint(0, node, ()))
        if parent in paths and float(torch.rand(())) < 0.8:
            paths[node] = [*paths[parent], node]
    return list(paths.values())
