"""The launches of acceptance by rejection and by traversal: a kernel walks the trees, others draw the tokens after."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from . import sizes
from .accept_residual_kernels import best_left, tree_at
from .kernel import Kernel, kernel
from .philox import ACCEPT, RECOVER
from .sample import draw_merge_kernel
from .types import Cost, Scratch, SeqKeys, Tree

BLOCK_V = 1024  # tokens of one program that draws


def accept_cost(
    tree: Tree, target_log_probs: Tensor, draft_log_probs: Tensor, keys: SeqKeys, max_path: int, lossless: bool
) -> Cost:
    """Every node's rows read once, as when each refuses one child."""
    return Cost(flops=8 * target_log_probs.numel(), bytes=8 * target_log_probs.numel())


def accept_scratch(
    tree: Tree, target_log_probs: Tensor, draft_log_probs: Tensor, keys: SeqKeys, max_path: int, lossless: bool
) -> Scratch:
    """What each node was tested with (see accept_residual_kernels.py), and the best token of each block."""
    num_nodes, vocab = target_log_probs.shape
    blocks = len(keys.seeds), sizes.cdiv(vocab, BLOCK_V)
    return {
        "tested": ((num_nodes, 3), torch.float32),
        "best_scores": (blocks, torch.float32),
        "best_ids": (blocks, torch.int32),
    }


@kernel
def _recover_kernel(
    best_scores_ptr,  # [num_seqs, num_blocks]
    best_ids_ptr,  # [num_seqs, num_blocks]
    paths_ptr,  # [num_seqs, max_path]
    path_lens_ptr,  # [num_seqs]
    tested_ptr,  # [num_nodes, 3]
    cu_nodes_ptr,  # [num_seqs + 1]
    tokens_ptr,  # [num_nodes]
    parents_ptr,  # [num_nodes]
    target_ptr,  # [num_nodes, vocab]
    draft_ptr,  # [num_nodes, vocab]
    seeds_ptr,  # [num_seqs]
    root_positions_ptr,  # [num_seqs]
    sample_idx_ptr,  # [num_seqs]
    vocab,
    max_path,
    recover_stream,
    LOSSLESS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The node where the path ended has refused all of its children, or if max_path ended it, none."""
    seq = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    first = tl.load(cu_nodes_ptr + seq).to(tl.int64)
    length = tl.load(path_lens_ptr + seq)
    node = tl.load(paths_ptr + seq * max_path + length - 1)
    end = node
    if LOSSLESS:
        end = tl.where(length < max_path, (tl.load(cu_nodes_ptr + seq + 1) - first).to(tl.int32), node)
    best, token = best_left(
        tree_at(first, target_ptr, draft_ptr, tested_ptr, tokens_ptr, parents_ptr, vocab),
        node,
        end,
        tl.load(seeds_ptr + seq),
        tl.load(root_positions_ptr + seq),
        tl.load(sample_idx_ptr + seq) << 15 | recover_stream,
        block,
        BLOCK_V,
    )
    tl.store(best_scores_ptr + seq * tl.num_programs(1) + block, best)
    tl.store(best_ids_ptr + seq * tl.num_programs(1) + block, token)


def launch_accept(
    walk: Kernel,
    paths: Tensor,
    path_lens: Tensor,
    next_tokens: Tensor,
    tested: Tensor,
    best_scores: Tensor,
    best_ids: Tensor,
    tree: Tree,
    target_log_probs: Tensor,
    draft_log_probs: Tensor,
    keys: SeqKeys,
    max_path: int,
    lossless: bool,
) -> None:
    """One program per request walks; one per block of the vocabulary finds its best token; one per request merges."""
    num_seqs, num_blocks = best_ids.shape
    inputs = (
        *(paths, path_lens, tested, tree.cu_nodes, tree.tokens, tree.parents, target_log_probs, draft_log_probs),
        *(keys.seeds, keys.root_positions, keys.sample_idx, target_log_probs.shape[1], max_path),
    )
    walk[(num_seqs,)](
        *inputs,
        ACCEPT,
        BLOCK_P=max(32, sizes.next_power_of_2(max_path)),
        BLOCK_V=2048 if sizes.runs_on_cpu(paths) else 8192,
        num_warps=16,
    )
    _recover_kernel[(num_seqs, num_blocks)](
        best_scores, best_ids, *inputs, RECOVER, LOSSLESS=bool(lossless), BLOCK_V=BLOCK_V
    )
    block_c = sizes.next_power_of_2(num_blocks)
    draw_merge_kernel[(num_seqs,)](
        next_tokens, best_scores, best_ids, 1, num_blocks, REPLACEMENT=False, BLOCK_C=block_c
    )
