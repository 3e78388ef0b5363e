"""The kernels of attention: one folds a prefix for all rows of a sequence, one each row's path, and merges."""

from __future__ import annotations

import triton.language as tl

from .attention_tiles import fold_tile, load_tile, merge_states
from .kernel import kernel
from .kv_store import load_slots


@kernel(do_not_specialize=["num_tokens", "max_blocks", "window", "group"])
def prefix_kernel(
    states_ptr,  # see attention_scratch
    q_ptr,  # [num_tokens, num_heads, head_dim]
    k_cache_ptr,  # [num_slots, num_kv_heads, cache_width]
    v_cache_ptr,  # [num_slots, num_kv_heads, cache_width]
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    context_lens_ptr,  # [num_seqs]
    block_tables_ptr,  # [num_seqs, max_blocks]
    num_tokens,
    num_shares,
    num_kv_heads,
    group,
    head_dim,
    cache_width,
    max_blocks,
    window,
    scale_log2,
    BLOCK_SIZE: tl.constexpr,  # of the paged cache
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Fold one split of a sequence's full prefix tiles for its rows and one group of heads.

    Windows are no matter here: a row that does not see all of a split makes nothing of its state.
    `num_shares` programs share a sequence's rows, one after the other, so that what one read the next finds in a cache.
    """
    seq = (tl.program_id(0) // num_shares).to(tl.int64)
    share = tl.program_id(0) % num_shares
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    first_tile = split * SPLIT
    context_len = tl.load(context_lens_ptr + seq)
    last_tile = tl.minimum(first_tile + SPLIT, context_len // TILE)
    if first_tile >= last_tile:
        return
    if WINDOWED and first_tile * TILE <= context_len - window:  # not even the root sees all of it
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
            k = load_tile(k_cache_ptr, slots, kv_head, num_kv_heads, head_dim, cache_width, q.dtype, BLOCK_D)
            v = load_tile(v_cache_ptr, slots, kv_head, num_kv_heads, head_dim, cache_width, q.dtype, BLOCK_D)
            running_max, running_sum, acc = fold_tile(running_max, running_sum, acc, q, k, v, scale_log2, None)
        states = split.to(tl.int64) * num_tokens * num_heads + heads
        running_max_ptr = states_ptr + num_states * head_dim
        tl.store(running_max_ptr + states, running_max, mask=mask_m)
        tl.store(running_max_ptr + num_states + states, running_sum, mask=mask_m)
        tl.store(states_ptr + states[:, None] * head_dim + offs_d[None, :], acc, mask=mask_md)


@kernel(do_not_specialize=["max_blocks", "max_path", "window", "num_splits", "group"])
def path_kernel(
    out_ptr,  # [num_tokens, num_heads, head_dim]
    states_ptr,  # see attention_scratch
    q_ptr,  # [num_tokens, num_heads, head_dim]
    k_cache_ptr,  # [num_slots, num_kv_heads, cache_width]
    v_cache_ptr,  # [num_slots, num_kv_heads, cache_width]
    seq_idx_ptr,  # [num_tokens]
    context_lens_ptr,  # [num_seqs]
    block_tables_ptr,  # [num_seqs, max_blocks]
    ancestors_ptr,  # [num_tokens, max_path]
    num_kv_heads,
    group,
    head_dim,
    cache_width,
    max_blocks,
    max_path,
    window,
    num_splits,
    scale_log2,
    BLOCK_SIZE: tl.constexpr,  # of the paged cache
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
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
    first_seen = tl.maximum(length - window, 0) if WINDOWED else 0

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
    for split in range(first_seen // (SPLIT * TILE), tl.cdiv(num_tiles, SPLIT)):
        first_tile = split * SPLIT
        begun = first_tile < prefix_tiles
        first_own = tl.maximum(first_tile, prefix_tiles)
        if WINDOWED:
            seen = first_tile * TILE >= first_seen  # all of the split; of any other the state is not the row's
            begun = begun & seen
            first_own = tl.where(seen, first_own, tl.maximum(first_tile, first_seen // TILE))
        states = split * split_states + heads
        mask_s = mask_m & begun
        acc = tl.load(states_ptr + states[:, None] * head_dim + offs_d[None, :], mask=mask_md & begun, other=0.0)
        running_max = tl.load(running_max_ptr + states, mask=mask_s, other=float("-inf"))
        running_sum = tl.load(running_max_ptr + num_states + states, mask=mask_s, other=0.0)
        # Without splits there is nothing to load, and the pointer is to whatever type.
        acc, running_max, running_sum = acc.to(tl.float32), running_max.to(tl.float32), running_sum.to(tl.float32)
        for tile in range(first_own, tl.minimum(first_tile + SPLIT, num_tiles)):
            visible = tile * TILE + offs_t < length
            # Past its end a path reads its last position again: not even with weight 0 may what lies elsewhere count.
            positions = tl.minimum(tile * TILE + offs_t, length - 1)
            if WINDOWED:  # nor what lies before its window
                visible = visible & (tile * TILE + offs_t >= first_seen)
                positions = tl.maximum(positions, first_seen)
            node = tl.load(path_ptr + positions - context_len, mask=positions >= context_len, other=0)
            tokens = tl.where(positions < context_len, positions, context_len + node)
            slots = load_slots(block_table_ptr, tokens, BLOCK_SIZE)
            k = load_tile(k_cache_ptr, slots, kv_head, num_kv_heads, head_dim, cache_width, q.dtype, BLOCK_D)
            v = load_tile(v_cache_ptr, slots, kv_head, num_kv_heads, head_dim, cache_width, q.dtype, BLOCK_D)
            running_max, running_sum, acc = fold_tile(
                running_max, running_sum, acc, q, k, v, scale_log2, visible[None, :]
            )
        total_max, total_sum, total = merge_states(total_max, total_sum, total, running_max, running_sum, acc)
    tl.store(out_ptr + heads[:, None] * head_dim + offs_d[None, :], total / total_sum[:, None], mask=mask_md)
