"""The paged KV cache: where positions are stored, and committing an accepted path to it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernel import kernel
from .op import op
from .samples import sample_paging
from .sizes import next_power_of_2
from .types import BlockTables, ContextLens, Cost, KVStorageWritten, Paths


def token_slots(block_tables: Tensor, block_size: int) -> Tensor:
    """Slot of every token a sequence's blocks hold, int32 [num_seqs, max_blocks * block_size]; negative if unused."""
    offsets = torch.arange(block_size, dtype=torch.int32, device=block_tables.device)
    return (block_tables[:, :, None] * block_size + offsets).flatten(1)


@triton.jit
def load_slots(
    block_table_ptr,  # [max_blocks], of one sequence
    tokens,  # int32, any shape: positions, or context_len plus node
    block_size,
):
    """int64 slots of the tokens, all of which the sequence's blocks hold."""
    return tl.load(block_table_ptr + tokens // block_size).to(tl.int64) * block_size + tokens % block_size


def commit_kv_reference(
    kv: KVStorageWritten, paths: Paths, context_lens: ContextLens, block_tables: BlockTables, block_size: int
) -> None:
    # A node's parent has a smaller id, so paths[s, j] >= j: no copy's source is another's earlier destination.
    depths = torch.arange(paths.shape[1], dtype=torch.int32, device=paths.device)
    seqs, moved = (paths > depths).nonzero(as_tuple=True)
    if seqs.numel() == 0:
        return
    slots = token_slots(block_tables, block_size)
    start = context_lens[seqs]
    kv[:, :, slots[seqs, start + moved]] = kv[:, :, slots[seqs, start + paths[seqs, moved]]]


def commit_kv_sample(
    dtype: torch.dtype,
    device: str,
    *,
    num_seqs: int,
    num_layers: int,
    max_path: int,
    max_context: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
) -> dict[str, Any]:
    """Paths are increasing node ids from 0, of 1 to max_path nodes among twice as many."""
    num_nodes = 2 * max_path
    contexts = torch.randint(0, max_context + 1, (num_seqs,)).tolist()
    paging = sample_paging(contexts, [num_nodes] * num_seqs, [n + num_nodes for n in contexts], block_size)
    paths = torch.full((num_seqs, max_path), -1, dtype=torch.int32)
    for path in paths:
        length = int(torch.randint(1, max_path + 1, ()))
        path[:length] = 0
        path[1:length] = torch.randperm(num_nodes - 1, dtype=torch.int32)[: length - 1].sort().values + 1
    num_slots = (int(paging.block_tables.max()) + 2) * block_size
    kv = torch.randn(num_layers, 2, num_slots, num_kv_heads, head_dim, dtype=dtype, device=device)
    return {
        "kv": kv,
        "paths": paths.to(device),
        "context_lens": paging.context_lens.to(device),
        "block_tables": paging.block_tables.to(device),
        "block_size": block_size,
    }


def commit_kv_cost(kv: Tensor, paths: Tensor, context_lens: Tensor, block_tables: Tensor, block_size: int) -> Cost:
    """As if every node of every path moved."""
    num_layers, two, _, num_kv_heads, head_dim = kv.shape
    return Cost(flops=0, bytes=2 * paths.numel() * num_layers * two * num_kv_heads * head_dim * kv.element_size())


@kernel
def _commit_kv_kernel(
    kv_ptr,  # [num_layers * 2, num_slots, width], written
    paths_ptr,  # [num_seqs, max_path]
    context_lens_ptr,  # [num_seqs]
    block_tables_ptr,  # [num_seqs, max_blocks]
    num_slots,
    width,
    max_path,
    max_blocks,
    block_size,
    BLOCK_W: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    plane_ptr = kv_ptr + tl.program_id(1).to(tl.int64) * num_slots * width
    block_table_ptr = block_tables_ptr + seq * max_blocks
    context_len = tl.load(context_lens_ptr + seq)
    # Ascending depth: a source is never below its destination, and each element stays in one thread.
    for depth in range(max_path):
        node = tl.load(paths_ptr + seq * max_path + depth)
        if node > depth:
            source = load_slots(block_table_ptr, context_len + node, block_size)
            target = load_slots(block_table_ptr, context_len + depth, block_size)
            for start in range(0, width, BLOCK_W):
                offs_w = start + tl.arange(0, BLOCK_W)
                mask_w = offs_w < width
                moved = tl.load(plane_ptr + source * width + offs_w, mask=mask_w)
                tl.store(plane_ptr + target * width + offs_w, moved, mask=mask_w)


@op(
    reference=commit_kv_reference,
    sample=commit_kv_sample,
    cost=commit_kv_cost,
    typical={
        "num_seqs": 8,
        "num_layers": 32,
        "max_path": 9,
        "max_context": 256,
        "block_size": 16,
        "num_kv_heads": 8,
        "head_dim": 128,
    },
)
def commit_kv(kv: Tensor, paths: Tensor, context_lens: Tensor, block_tables: Tensor, block_size: int) -> None:
    """Copy node paths[s, j]'s keys and values to slot context_len + j: the accepted path becomes the prefix.

    All layers, keys and values in one launch; one program per sequence and plane, ascending in depth. A path's node
    ids increase; the first -1 ends it.
    """
    if block_size < 1:
        raise ValueError(f"commit_kv: block_size is {block_size}, must be at least 1")
    num_layers, two, num_slots, num_kv_heads, head_dim = kv.shape
    width = num_kv_heads * head_dim
    num_seqs, max_path = paths.shape
    _commit_kv_kernel[(num_seqs, num_layers * two)](
        kv,
        paths,
        context_lens,
        block_tables,
        num_slots,
        width,
        max_path,
        block_tables.shape[1],
        block_size,
        BLOCK_W=min(1024, next_power_of_2(width)),
    )
