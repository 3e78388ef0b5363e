"""Decode-class attention: the rows of each sequence are nodes of its tree, over a paged KV cache.

A row's keys are folded in position order, tile by tile at fixed positions, so its result depends on its query, keys
and values alone: not on how much of its path is committed, nor on node ids, block size or the rest of the batch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from . import sizes
from .attention_tiles import LOG2_E, fold_tile, load_tile, merge_states
from .kernel import kernel
from .kv_store import load_slots, token_slots
from .op import op
from .samples import paging_to, sample_caches, sample_paging, sample_tree
from .sizes import cdiv, next_power_of_2
from .types import Ancestors, Cost, KVCache, Paging, Queries, Scratch

TILE = 32  # positions folded at once
SPLIT = 8  # tiles folded into one state before states are merged
CPU_ALONE = 1 << 14  # elements of queries times tiles up to which the CPU folds every row by itself


def attention_reference(
    q: Queries, k_cache: KVCache, v_cache: KVCache, paging: Paging, ancestors: Ancestors, scale: float
) -> Queries:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    group = num_heads // num_kv_heads
    # [num_kv_heads, num_tokens, group, head_dim], so that a sequence's rows and their grouped heads are one matrix
    grouped = (q.float() * scale).view(num_tokens, num_kv_heads, group, head_dim).transpose(0, 1)
    slots = token_slots(paging.block_tables, paging.block_size)
    # Past its end a path reads the root, which is always there: not even behind a mask may NaN be multiplied.
    path_tokens = paging.context_lens[paging.seq_idx, None] + ancestors.clamp(min=0)
    path_slots = slots[paging.seq_idx[:, None], path_tokens].flatten()
    path_keys, path_values = (
        cache.index_select(0, path_slots).float().view(num_tokens, -1, num_kv_heads, head_dim).transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    path_scores = grouped @ path_keys.permute(1, 0, 3, 2)
    path_scores.masked_fill_((ancestors < 0)[:, None], float("-inf"))

    shape = (num_kv_heads, num_tokens, group, paging.max_context)
    scores = torch.full(shape, float("-inf"), dtype=torch.float32, device=q.device)
    bounds, contexts = paging.cu_seqlens_q.tolist(), paging.context_lens.tolist()
    prefixes = [
        (slice(first, last), slots[seq, :length], length)
        for seq, (first, last, length) in enumerate(zip(bounds, bounds[1:], contexts, strict=False))
        if length and last > first
    ]
    for rows, prefix, length in prefixes:
        keys = k_cache.index_select(0, prefix).float().permute(1, 2, 0)
        scores[:, rows, :, :length] = (grouped[:, rows].flatten(1, 2) @ keys).unflatten(1, (-1, group))

    probs = torch.cat([scores, path_scores], -1).softmax(-1)
    out = probs[..., paging.max_context :] @ path_values.transpose(0, 1)
    for rows, prefix, length in prefixes:
        values = v_cache.index_select(0, prefix).float().transpose(0, 1)
        out[:, rows] += (probs[:, rows, :, :length].flatten(1, 2) @ values).unflatten(1, (-1, group))
    return out.transpose(0, 1).reshape(q.shape).to(q.dtype).contiguous()


def attention_sample(
    dtype: torch.dtype,
    device: str,
    *,
    num_seqs: int,
    max_nodes: int,
    max_context: int,
    block_size: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
) -> dict[str, Any]:
    """Random trees over ragged contexts; every slot that no row's path holds is NaN."""
    num_nodes = [max_nodes, *torch.randint(1, max_nodes + 1, (num_seqs - 1,)).tolist()]
    contexts = [max_context, *torch.randint(0, max_context + 1, (num_seqs - 1,)).tolist()]
    trees = [sample_tree(n) for n in num_nodes]
    paging = sample_paging(
        contexts, [len(t) for t in trees], [n + c for n, c in zip(num_nodes, contexts, strict=True)], block_size
    )
    paths = [path for tree in trees for path in tree]
    ancestors = torch.full((len(paths), max(len(p) for p in paths)), -1, dtype=torch.int32)
    for row, path in enumerate(paths):
        ancestors[row, : len(path)] = torch.tensor(path, dtype=torch.int32)
    slots = token_slots(paging.block_tables, block_size)
    used = torch.cat(
        [
            slots[seq, [*range(context), *(context + path[-1] for path in tree)]]
            for seq, (context, tree) in enumerate(zip(contexts, trees, strict=True))
        ]
    )
    k_cache, v_cache = sample_caches(used, num_kv_heads, head_dim, dtype, device)
    return {
        "q": torch.randn(len(paths), num_kv_heads * group, head_dim, dtype=dtype, device=device),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "paging": paging_to(paging, device),
        "ancestors": ancestors.to(device),
        "scale": head_dim**-0.5,
    }


def attention_cost(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, paging: Paging, ancestors: Tensor, scale: float
) -> Cost:
    """Prefixes are read once per sequence, paths once per row."""
    _, num_kv_heads, head_dim = k_cache.shape
    path_keys = int((ancestors >= 0).sum())
    scored = int(paging.context_lens[paging.seq_idx].sum()) + path_keys
    read = (int(paging.context_lens.sum()) + path_keys) * 2 * num_kv_heads * head_dim
    return Cost(flops=4 * scored * q.shape[1] * head_dim, bytes=(read + 2 * q.numel()) * q.element_size())


@kernel(do_not_specialize=["num_tokens", "max_blocks", "group"])
def _prefix_kernel(
    states_ptr,  # see attention_scratch
    q_ptr,  # [num_tokens, num_heads, head_dim]
    k_cache_ptr,  # [num_slots, num_kv_heads, head_dim]
    v_cache_ptr,  # [num_slots, num_kv_heads, head_dim]
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    context_lens_ptr,  # [num_seqs]
    block_tables_ptr,  # [num_seqs, max_blocks]
    num_tokens,
    num_shares,
    num_kv_heads,
    group,
    head_dim,
    max_blocks,
    scale_log2,
    BLOCK_SIZE: tl.constexpr,  # of the paged cache
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Fold one split of a sequence's full prefix tiles for its rows and one group of heads.

    `num_shares` programs share a sequence's rows, one after the other, so that what one read the next finds in a cache.
    """
    seq = (tl.program_id(0) // num_shares).to(tl.int64)
    share = tl.program_id(0) % num_shares
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    first_tile = split * SPLIT
    last_tile = tl.minimum(first_tile + SPLIT, tl.load(context_lens_ptr + seq) // TILE)
    if first_tile >= last_tile:
        return
    first_row = tl.load(cu_seqlens_q_ptr + seq)
    num_rows = tl.load(cu_seqlens_q_ptr + seq + 1) - first_row
    num_heads = num_kv_heads * group
    num_states = tl.num_programs(2).to(tl.int64) * num_tokens * num_heads
    block_table_ptr = block_tables_ptr + seq * max_blocks
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < head_dim
    offs_t = tl.arange(0, TILE)
    # Rows and their grouped heads, packed.
    for start in range(share * BLOCK_M, num_rows * group, num_shares * BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        mask_m = offs_m < num_rows * group
        heads = (first_row + offs_m // group).to(tl.int64) * num_heads + kv_head * group + offs_m % group
        mask_md = mask_m[:, None] & mask_d[None, :]
        q = tl.load(q_ptr + heads[:, None] * head_dim + offs_d[None, :], mask=mask_md, other=0.0)
        running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        running_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for tile in range(first_tile, last_tile):
            slots = load_slots(block_table_ptr, tile * TILE + offs_t, BLOCK_SIZE)
            k = load_tile(k_cache_ptr, slots, kv_head, num_kv_heads, head_dim, BLOCK_D)
            v = load_tile(v_cache_ptr, slots, kv_head, num_kv_heads, head_dim, BLOCK_D)
            running_max, running_sum, acc = fold_tile(running_max, running_sum, acc, q, k, v, scale_log2, None)
        states = split.to(tl.int64) * num_tokens * num_heads + heads
        running_max_ptr = states_ptr + num_states * head_dim
        tl.store(running_max_ptr + states, running_max, mask=mask_m)
        tl.store(running_max_ptr + num_states + states, running_sum, mask=mask_m)
        tl.store(states_ptr + states[:, None] * head_dim + offs_d[None, :], acc, mask=mask_md)


@kernel(do_not_specialize=["max_blocks", "max_path", "num_splits", "group"])
def _path_kernel(
    out_ptr,  # [num_tokens, num_heads, head_dim]
    states_ptr,  # see attention_scratch
    q_ptr,  # [num_tokens, num_heads, head_dim]
    k_cache_ptr,  # [num_slots, num_kv_heads, head_dim]
    v_cache_ptr,  # [num_slots, num_kv_heads, head_dim]
    seq_idx_ptr,  # [num_tokens]
    context_lens_ptr,  # [num_seqs]
    block_tables_ptr,  # [num_seqs, max_blocks]
    ancestors_ptr,  # [num_tokens, max_path]
    num_kv_heads,
    group,
    head_dim,
    max_blocks,
    max_path,
    num_splits,
    scale_log2,
    BLOCK_SIZE: tl.constexpr,  # of the paged cache
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Fold the rest of one row's positions, through its path, and merge the states of all splits in order."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    seq = tl.load(seq_idx_ptr + row).to(tl.int64)
    context_len = tl.load(context_lens_ptr + seq)
    block_table_ptr = block_tables_ptr + seq * max_blocks
    path_ptr = ancestors_ptr + row * max_path
    length = context_len
    for start in range(0, max_path, BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        node = tl.load(path_ptr + offs_p, mask=offs_p < max_path, other=-1)
        length += tl.sum((node >= 0).to(tl.int32), axis=0)
    prefix_tiles = tl.where(num_splits > 0, context_len // TILE, 0)
    num_tiles = tl.cdiv(length, TILE)

    num_heads = num_kv_heads * group
    offs_m = tl.arange(0, BLOCK_M)
    mask_m = offs_m < group
    offs_d = tl.arange(0, BLOCK_D)
    mask_md = mask_m[:, None] & (offs_d < head_dim)[None, :]
    offs_t = tl.arange(0, TILE)
    heads = row * num_heads + kv_head * group + offs_m
    q = tl.load(q_ptr + heads[:, None] * head_dim + offs_d[None, :], mask=mask_md, other=0.0)

    split_states = tl.num_programs(0).to(tl.int64) * num_heads
    num_states = num_splits * split_states
    running_max_ptr = states_ptr + num_states * head_dim
    total_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_sum = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for split in range(tl.cdiv(num_tiles, SPLIT)):
        first_tile = split * SPLIT
        begun = first_tile < prefix_tiles
        states = split * split_states + heads
        mask_s = mask_m & begun
        acc = tl.load(states_ptr + states[:, None] * head_dim + offs_d[None, :], mask=mask_md & begun, other=0.0)
        running_max = tl.load(running_max_ptr + states, mask=mask_s, other=float("-inf"))
        running_sum = tl.load(running_max_ptr + num_states + states, mask=mask_s, other=0.0)
        # Without splits there is nothing to load, and the pointer is to whatever type.
        acc, running_max, running_sum = acc.to(tl.float32), running_max.to(tl.float32), running_sum.to(tl.float32)
        for tile in range(tl.maximum(first_tile, prefix_tiles), tl.minimum(first_tile + SPLIT, num_tiles)):
            visible = tile * TILE + offs_t < length
            # Past its end a path reads its last position again: not even with weight 0 may what lies elsewhere count.
            positions = tl.minimum(tile * TILE + offs_t, length - 1)
            node = tl.load(path_ptr + positions - context_len, mask=positions >= context_len, other=0)
            tokens = tl.where(positions < context_len, positions, context_len + node)
            slots = load_slots(block_table_ptr, tokens, BLOCK_SIZE)
            k = load_tile(k_cache_ptr, slots, kv_head, num_kv_heads, head_dim, BLOCK_D)
            v = load_tile(v_cache_ptr, slots, kv_head, num_kv_heads, head_dim, BLOCK_D)
            running_max, running_sum, acc = fold_tile(
                running_max, running_sum, acc, q, k, v, scale_log2, visible[None, :]
            )
        total_max, total_sum, total = merge_states(total_max, total_sum, total, running_max, running_sum, acc)
    tl.store(out_ptr + heads[:, None] * head_dim + offs_d[None, :], total / total_sum[:, None], mask=mask_md)


def attention_scratch(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, paging: Paging, ancestors: Tensor, scale: float
) -> Scratch:
    """Every row's unmerged states per split of the prefix: un-normalised outputs, then running maxima, then sums.

    One buffer [num_splits, num_tokens, num_heads, head_dim + 2]; in it each of the three is contiguous.
    """
    splits = num_splits(q, paging)
    return {"states": ((splits, q.shape[0], q.shape[1], q.shape[2] + 2), torch.float32) if splits else None}


def num_splits(q: Tensor, paging: Paging) -> int:
    """Splits whose states the prefix kernel makes; 0 where the path kernel had better do all by itself.

    On a GPU that is where there is one split of one row each. On a CPU it is where folding a row's tiles for it alone
    costs less than a second launch.
    """
    tiles = paging.max_context // TILE
    if sizes.runs_on_cpu(q):
        return 0 if q.numel() * tiles <= CPU_ALONE else cdiv(tiles, SPLIT)
    return 0 if tiles <= SPLIT and q.shape[0] == paging.context_lens.shape[0] else cdiv(tiles, SPLIT)


@cache
def cpu_block_m(num_rows: int) -> int:
    """Rows folded at once: few, to pad little; many, to look up slots seldom, which costs as much as two rows."""
    return min((1, 4, 8, 16), key=lambda rows: cdiv(num_rows, rows) * (rows + 2))


@op(
    reference=attention_reference,
    sample=attention_sample,
    cost=attention_cost,
    scratch=attention_scratch,
    typical={
        "num_seqs": 8,
        "max_nodes": 32,
        "max_context": 2048,
        "block_size": 16,
        "num_kv_heads": 8,
        "group": 4,
        "head_dim": 128,
    },
)
def attention(
    out: Tensor,
    states: Tensor | None,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    paging: Paging,
    ancestors: Tensor,
    scale: float,
) -> None:
    """out = softmax(scale * q k^T) v over each row's prefix and path; statistics in fp32."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    group = num_heads // num_kv_heads
    # Nothing here may depend on the batch: the same dot shapes fold a row's keys wherever it stands.
    # Five stages keep two tiles in flight; the other stages go to the block table, which is read before them.
    on_cpu = sizes.runs_on_cpu(q)
    least, options = (1, {}) if on_cpu else (16, {"num_warps": 4, "num_stages": 5})  # tensor cores: no narrower dot
    block_d = max(least, next_power_of_2(head_dim))
    contexts, tables = paging.context_lens, paging.block_tables
    max_blocks, scale_log2 = tables.shape[1], scale * LOG2_E
    splits = 0 if states is None else states.shape[0]
    if states is not None:
        # Rows are summed alike in tiles of any height here, so the CPU may choose it by their number.
        num_rows = paging.max_rows * group
        block_m = cpu_block_m(num_rows) if on_cpu else max(16, next_power_of_2(group))
        shares = cdiv(num_rows, block_m) if on_cpu else 1  # of a sequence's rows: a GPU has them read its keys once
        _prefix_kernel[(contexts.shape[0] * shares, num_kv_heads, splits)](
            states,
            q,
            k_cache,
            v_cache,
            paging.cu_seqlens_q,
            contexts,
            tables,
            num_tokens,
            shares,
            num_kv_heads,
            group,
            head_dim,
            max_blocks,
            scale_log2,
            paging.block_size,
            TILE,
            SPLIT,
            block_m,
            block_d,
            **options,
        )
    _path_kernel[(num_tokens, num_kv_heads)](
        out,
        out if states is None else states,
        q,
        k_cache,
        v_cache,
        paging.seq_idx,
        contexts,
        tables,
        ancestors,
        num_kv_heads,
        group,
        head_dim,
        max_blocks,
        ancestors.shape[1],
        splits,
        scale_log2,
        paging.block_size,
        TILE,
        SPLIT,
        max(least, next_power_of_2(group)),
        block_d,
        64,
        **options,
    )
