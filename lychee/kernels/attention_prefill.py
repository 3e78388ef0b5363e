"""Prefill-class attention: causal, over chunks of tokens whose keys and values are already in the paged KV cache."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from . import sizes
from .attention import SPLIT, TILE
from .attention_tiles import LOG2_E, check_window, fold_tile, load_tile, merge_states, window_start
from .kernel import kernel
from .kv_int8 import cached_rows, check_cache
from .kv_store import load_slots, token_slots
from .op import op
from .samples import paging_to, sample_caches, sample_paging
from .sizes import cdiv, next_power_of_2
from .types import Cost, KVCache, Paging, Queries


def attention_prefill_reference(
    q: Queries, k_cache: KVCache, v_cache: KVCache, paging: Paging, scale: float, window: int = 0
) -> Queries:
    slots = token_slots(paging.block_tables, paging.block_size)
    bounds, contexts = paging.cu_seqlens_q.tolist(), paging.context_lens.tolist()
    out = torch.empty_like(q)
    for seq, (first, last, context) in enumerate(zip(bounds, bounds[1:], contexts, strict=False)):
        rows, start = last - first, window_start(context, window)
        seen = slots[seq, start : context + rows]
        mask = torch.ones(rows, len(seen), dtype=torch.bool, device=q.device).tril_(context - start)
        out[first:last] = F.scaled_dot_product_attention(
            q[first:last].float().transpose(0, 1),
            cached_rows(k_cache, seen, q.shape[2]).transpose(0, 1),
            cached_rows(v_cache, seen, q.shape[2]).transpose(0, 1),
            attn_mask=mask.triu_(context - start - window + 1) if window else mask,
            scale=scale,
            enable_gqa=True,
        ).transpose(0, 1)
    return out


def attention_prefill_sample(
    dtype: torch.dtype,
    device: str,
    *,
    num_seqs: int,
    max_rows: int,
    max_context: int,
    block_size: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    window: int = 0,
    int8_cache: int = 0,
) -> dict[str, Any]:
    """Ragged chunks over ragged contexts; every slot that no row sees is NaN."""
    rows = [max_rows, *torch.randint(1, max_rows + 1, (num_seqs - 1,)).tolist()]
    contexts = [max_context, *torch.randint(0, max_context + 1, (num_seqs - 1,)).tolist()]
    lengths = [n + c for n, c in zip(rows, contexts, strict=True)]
    paging = sample_paging(contexts, rows, lengths, block_size)
    slots = token_slots(paging.block_tables, block_size)
    starts = [window_start(context, window) for context in contexts]
    used = torch.cat([slots[seq, start:end] for seq, (start, end) in enumerate(zip(starts, lengths, strict=True))])
    k_cache, v_cache = sample_caches(used, num_kv_heads, head_dim, dtype, device, int8_cache)
    return {
        "q": torch.randn(sum(rows), num_kv_heads * group, head_dim, dtype=dtype, device=device),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "paging": paging_to(paging, device),
        "scale": head_dim**-0.5,
        "window": window,
    }


def attention_prefill_cost(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, paging: Paging, scale: float, window: int = 0
) -> Cost:
    """Keys and values are read once per sequence; the causal half of the chunk is scored."""
    head_dim, slot = q.shape[2], k_cache.shape[1] * k_cache.shape[2] * k_cache.element_size()
    widest = window or paging.max_context + paging.max_rows
    rows, contexts = paging.cu_seqlens_q.diff().long(), paging.context_lens.long()
    places = torch.arange(q.shape[0], device=q.device) - paging.cu_seqlens_q[paging.seq_idx]
    scored = int((contexts[paging.seq_idx] + places + 1).clamp(max=widest).sum())
    read = int((rows + contexts.clamp(max=widest)).sum())
    return Cost(flops=4 * scored * q.shape[1] * head_dim, bytes=2 * read * slot + 2 * q.nbytes)


@triton.jit
def _fold_tiles(
    start,
    end,
    q,
    row_positions,
    first_seen,
    length,
    window,
    k_cache_ptr,
    v_cache_ptr,
    block_table_ptr,
    kv_head,
    num_kv_heads,
    head_dim,
    cache_width,
    scale_log2,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """State of the rows over positions start .. end, of which a row sees those of its window up to its own.

    The maximum begins finite: of tiles before its window a row sees nothing, and -inf less -inf is NaN.
    """
    running_max = tl.full([BLOCK_M], -3e38, tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for tile_start in range(start, end, TILE):
        positions = tile_start + tl.arange(0, TILE)
        visible = positions[None, :] <= row_positions[:, None]
        tokens = tl.minimum(positions, length - 1)
        if WINDOWED:
            visible = visible & (positions[None, :] > row_positions[:, None] - window)
            tokens = tl.maximum(tokens, first_seen)
        slots = load_slots(block_table_ptr, tokens, BLOCK_SIZE)
        k = load_tile(k_cache_ptr, slots, kv_head, num_kv_heads, head_dim, cache_width, q.dtype, BLOCK_D)
        v = load_tile(v_cache_ptr, slots, kv_head, num_kv_heads, head_dim, cache_width, q.dtype, BLOCK_D)
        running_max, running_sum, acc = fold_tile(running_max, running_sum, acc, q, k, v, scale_log2, visible)
    return running_max, running_sum, acc


@kernel(do_not_specialize=["max_blocks", "window"])
def _prefill_kernel(
    out_ptr,  # [num_tokens, num_heads, head_dim]
    q_ptr,  # [num_tokens, num_heads, head_dim]
    k_cache_ptr,  # [num_slots, num_kv_heads, cache_width]
    v_cache_ptr,  # [num_slots, num_kv_heads, cache_width]
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    context_lens_ptr,  # [num_seqs]
    block_tables_ptr,  # [num_seqs, max_blocks]
    num_kv_heads,
    group,
    head_dim,
    cache_width,
    max_blocks,
    window,
    scale_log2,
    BLOCK_SIZE: tl.constexpr,  # of the paged cache
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,  # tiles folded into one state before states are merged; 0 for all
    WINDOWED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One tile of a sequence's rows and their grouped heads, packed, over all positions that any of them sees."""
    start = tl.program_id(0) * BLOCK_M
    kv_head = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    first_row = tl.load(cu_seqlens_q_ptr + seq)
    num_rows = tl.load(cu_seqlens_q_ptr + seq + 1) - first_row
    if start >= num_rows * group:
        return
    context_len = tl.load(context_lens_ptr + seq)
    block_table_ptr = block_tables_ptr + seq * max_blocks
    offs_m = start + tl.arange(0, BLOCK_M)
    mask_m = offs_m < num_rows * group
    offs_d = tl.arange(0, BLOCK_D)
    mask_md = mask_m[:, None] & (offs_d < head_dim)[None, :]
    num_heads = num_kv_heads * group
    heads = (first_row + offs_m // group).to(tl.int64) * num_heads + kv_head * group + offs_m % group
    offsets = heads[:, None] * head_dim + offs_d[None, :]
    q = tl.load(q_ptr + offsets, mask=mask_md, other=0.0)
    row_positions = context_len + offs_m // group
    length = context_len + tl.minimum((start + BLOCK_M - 1) // group + 1, num_rows)
    first_seen = tl.maximum(context_len + start // group + 1 - window, 0) if WINDOWED else 0
    first_tile = first_seen // TILE * TILE
    if SPLIT == 0:
        _, total_sum, total = _fold_tiles(
            first_tile,
            length,
            q,
            row_positions,
            first_seen,
            length,
            window,
            k_cache_ptr,
            v_cache_ptr,
            block_table_ptr,
            kv_head,
            num_kv_heads,
            head_dim,
            cache_width,
            scale_log2,
            BLOCK_SIZE,
            TILE,
            WINDOWED,
            BLOCK_M,
            BLOCK_D,
        )
    else:  # in decode's order
        total_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total_sum = tl.zeros([BLOCK_M], tl.float32)
        total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for split_start in range(first_seen // (SPLIT * TILE) * (SPLIT * TILE), length, SPLIT * TILE):
            running_max, running_sum, acc = _fold_tiles(
                tl.maximum(split_start, first_tile),
                tl.minimum(split_start + SPLIT * TILE, length),
                q,
                row_positions,
                first_seen,
                length,
                window,
                k_cache_ptr,
                v_cache_ptr,
                block_table_ptr,
                kv_head,
                num_kv_heads,
                head_dim,
                cache_width,
                scale_log2,
                BLOCK_SIZE,
                TILE,
                WINDOWED,
                BLOCK_M,
                BLOCK_D,
            )
            seen = split_start <= row_positions
            merged_max, merged_sum, merged = merge_states(total_max, total_sum, total, running_max, running_sum, acc)
            total_max = tl.where(seen, merged_max, total_max)
            total_sum = tl.where(seen, merged_sum, total_sum)
            total = tl.where(seen[:, None], merged, total)
    tl.store(out_ptr + offsets, total / total_sum[:, None], mask=mask_md)


@op(
    reference=attention_prefill_reference,
    sample=attention_prefill_sample,
    cost=attention_prefill_cost,
    typical={
        "num_seqs": 2,
        "max_rows": 512,
        "max_context": 1024,
        "block_size": 16,
        "num_kv_heads": 8,
        "group": 4,
        "head_dim": 128,
        "window": 0,
        "int8_cache": 0,
    },
)
def attention_prefill(
    out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, paging: Paging, scale: float, window: int = 0
) -> None:
    """out = softmax(scale * q k^T) v, row i of a sequence over positions 0 .. context_len + i; statistics in fp32.

    With a window, over the last `window` of those. Raises ValueError where it is negative.
    """
    check_window("attention_prefill", window)
    check_cache("attention_prefill", q, k_cache.shape[1], q.shape[2], k_cache)
    _, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    group = num_heads // num_kv_heads
    if sizes.runs_on_cpu(q):
        block_m, tile, split = 8 if paging.max_rows * group <= 64 else 32, TILE, SPLIT  # few, for each is compiled
    else:
        block_m, tile = (128, 64) if q.element_size() == 2 else (32, 32)  # larger ones spill registers
        split = 0  # tensor cores sum prefill's tiles in another order than decode's anyway
    grid = (cdiv(paging.max_rows * group, block_m), num_kv_heads, paging.context_lens.shape[0])
    _prefill_kernel[grid](
        out,
        q,
        k_cache,
        v_cache,
        paging.cu_seqlens_q,
        paging.context_lens,
        paging.block_tables,
        num_kv_heads,
        group,
        head_dim,
        k_cache.shape[2],
        paging.block_tables.shape[1],
        window,
        scale * LOG2_E,
        BLOCK_SIZE=paging.block_size,
        TILE=tile,
        SPLIT=split,
        WINDOWED=0 < window < paging.max_context + paging.max_rows,
        BLOCK_M=block_m,
        BLOCK_D=max(1 if sizes.runs_on_cpu(q) else 16, next_power_of_2(head_dim)),
        num_warps=8,
        num_stages=2,
    )
