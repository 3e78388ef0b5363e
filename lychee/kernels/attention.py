"""Decode-class attention: the rows of each sequence are nodes of its tree, over a paged KV cache.

A row's keys are folded in position order, tile by tile at fixed positions, so its result depends on its query, keys
and values alone: not on how much of its path is committed, nor on node ids, block size or the rest of the batch. With
a window it sees the last `window` positions up to its own, and what lies before them is neither read nor counted.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import sizes
from .attention_kernels import path_kernel, prefix_kernel
from .attention_tiles import LOG2_E, check_window, window_start
from .kv_int8 import cached_rows, check_cache
from .kv_store import token_slots
from .op import op
from .samples import paging_to, sample_caches, sample_paging, sample_tree
from .sizes import cdiv, next_power_of_2
from .types import Ancestors, Cost, KVCache, Paging, Queries, Scratch

TILE = 32  # positions folded at once
SPLIT = 8  # tiles folded into one state before states are merged
CPU_ALONE = 1 << 14  # elements of queries times tiles up to which the CPU folds every row by itself


def attention_reference(
    q: Queries,
    k_cache: KVCache,
    v_cache: KVCache,
    paging: Paging,
    ancestors: Ancestors,
    scale: float,
    window: int = 0,
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
        cached_rows(cache, path_slots, head_dim).view(num_tokens, -1, num_kv_heads, head_dim).transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    path_scores = grouped @ path_keys.permute(1, 0, 3, 2)
    lengths = paging.context_lens[paging.seq_idx] + (ancestors >= 0).sum(1, dtype=torch.int32)
    seen_from = (lengths - window).clamp(min=0) if window else torch.zeros_like(lengths)
    depths = torch.arange(ancestors.shape[1], device=q.device)
    unseen = (ancestors < 0) | (paging.context_lens[paging.seq_idx, None] + depths < seen_from[:, None])
    path_scores.masked_fill_(unseen[:, None], float("-inf"))

    shape = (num_kv_heads, num_tokens, group, paging.max_context)
    scores = torch.full(shape, float("-inf"), dtype=torch.float32, device=q.device)
    bounds, contexts = paging.cu_seqlens_q.tolist(), paging.context_lens.tolist()
    prefixes = []  # rows of a sequence, the span of its prefix that any of them sees, and the slots of that span
    for seq, (first, last, length) in enumerate(zip(bounds, bounds[1:], contexts, strict=False)):
        if last > first and (start := int(seen_from[first:last].min())) < length:
            prefixes.append((slice(first, last), slice(start, length), slots[seq, start:length]))
    for rows, span, prefix in prefixes:
        keys = cached_rows(k_cache, prefix, head_dim).permute(1, 2, 0)
        scores[:, rows, :, span] = (grouped[:, rows].flatten(1, 2) @ keys).unflatten(1, (-1, group))
    before = torch.arange(paging.max_context, device=q.device) < seen_from[:, None]
    scores.masked_fill_(before[:, None], float("-inf"))

    probs = torch.cat([scores, path_scores], -1).softmax(-1)
    out = probs[..., paging.max_context :] @ path_values.transpose(0, 1)
    for rows, span, prefix in prefixes:
        values = cached_rows(v_cache, prefix, head_dim).transpose(0, 1)
        out[:, rows] += (probs[:, rows, :, span].flatten(1, 2) @ values).unflatten(1, (-1, group))
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
    window: int = 0,
    int8_cache: int = 0,
) -> dict[str, Any]:
    """Random trees over ragged contexts; every slot that no row sees is NaN."""
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
            slots[seq, [*range(window_start(context, window), context), *(context + path[-1] for path in tree)]]
            for seq, (context, tree) in enumerate(zip(contexts, trees, strict=True))
        ]
    )
    k_cache, v_cache = sample_caches(used, num_kv_heads, head_dim, dtype, device, int8_cache)
    return {
        "q": torch.randn(len(paths), num_kv_heads * group, head_dim, dtype=dtype, device=device),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "paging": paging_to(paging, device),
        "ancestors": ancestors.to(device),
        "scale": head_dim**-0.5,
        "window": window,
    }


def attention_cost(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, paging: Paging, ancestors: Tensor, scale: float, window: int = 0
) -> Cost:
    """Prefixes are read once per sequence, paths once per row."""
    head_dim = q.shape[2]
    widest = window or paging.max_context + ancestors.shape[1]
    path_keys = (ancestors >= 0).sum(1)
    scored = int((paging.context_lens[paging.seq_idx] + path_keys).clamp(max=widest).sum())
    read = int(paging.context_lens.clamp(max=widest).sum() + path_keys.clamp(max=widest).sum())
    slot = k_cache.shape[1] * k_cache.shape[2] * k_cache.element_size()
    return Cost(flops=4 * scored * q.shape[1] * head_dim, bytes=2 * read * slot + 2 * q.nbytes)


def attention_scratch(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, paging: Paging, ancestors: Tensor, scale: float, window: int = 0
) -> Scratch:
    """Every row's unmerged states per split of the prefix: un-normalised outputs, then running maxima, then sums.

    One buffer [num_splits, num_tokens, num_heads, head_dim + 2]; in it each of the three is contiguous.
    """
    splits = num_splits(q, paging, window)
    return {"states": ((splits, q.shape[0], q.shape[1], q.shape[2] + 2), torch.float32) if splits else None}


def num_splits(q: Tensor, paging: Paging, window: int = 0) -> int:
    """Splits whose states the prefix kernel makes; 0 where the path kernel had better do all by itself.

    On a GPU that is where there is one split of one row each. On a CPU it is where folding a row's tiles for it alone
    costs less than a second launch.
    """
    tiles = paging.max_context // TILE
    seen = min(tiles, window // TILE) if window else tiles
    if sizes.runs_on_cpu(q):
        return 0 if q.numel() * seen <= CPU_ALONE else cdiv(tiles, SPLIT)
    return 0 if seen <= SPLIT and q.shape[0] == paging.context_lens.shape[0] else cdiv(tiles, SPLIT)


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
        "window": 0,
        "int8_cache": 0,
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
    window: int = 0,
) -> None:
    """out = softmax(scale * q k^T) v over each row's prefix and path; statistics in fp32.

    A row at position p sees the keys of positions above p - window; all of them where `window` is 0. Raises ValueError
    where it is negative.
    """
    check_window("attention", window)
    check_cache("attention", q, k_cache.shape[1], q.shape[2], k_cache)
    windowed = 0 < window < paging.max_context + ancestors.shape[1]
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
        prefix_kernel[(contexts.shape[0] * shares, num_kv_heads, splits)](
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
            k_cache.shape[2],
            max_blocks,
            window,
            scale_log2,
            paging.block_size,
            TILE,
            SPLIT,
            windowed,
            block_m,
            block_d,
            **options,
        )
    path_kernel[(num_tokens, num_kv_heads)](
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
        k_cache.shape[2],
        max_blocks,
        ancestors.shape[1],
        window,
        splits,
        scale_log2,
        paging.block_size,
        TILE,
        SPLIT,
        windowed,
        max(least, next_power_of_2(group)),
        block_d,
        64,
        **options,
    )
