"""Recursive rejection without replacement (Sequoia, arXiv:2402.12374; RSD, arXiv:2402.14160).

What is emitted is distributed as the target.

At a node with children x1..xm drawn in that order without replacement from d, against target t: accept a child x with
probability min(1, t[x] / d[x]); after a rejection t <- normalise(max(t - d, 0)) and d[x] <- 0, renormalised. The next
token is drawn from what t has become: the recovered token after a rejection, the bonus token at a leaf.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from .accept_launch import accept_cost, accept_scratch, launch_accept
from .accept_residual import Decision, Residual, accepted
from .accept_residual_kernels import accepts, chance_of, refuse, tree_at
from .accept_samples import drawn_trees_sample
from .kernel import kernel
from .op import op
from .types import NextTokens, NodeLogProbs, PathLens, Paths, SeqKeys, Tree


def walk(
    tokens: list[int],
    parents: list[int],
    target_log_probs: Tensor,
    draft_log_probs: Tensor,
    accept: Decision,
    max_path: int,
    lossless: bool,
) -> tuple[list[int], Tensor]:
    """One sequence's accepted path, and the weights [vocab] by which its next token must be drawn.

    Parents precede their children, so one scan descends. Every decision is asked of `accept`, so that a test can
    follow them all.
    """
    path, left = [0], Residual(target_log_probs[0], draft_log_probs[0])
    for child, token in enumerate(tokens):
        if parents[child] != path[-1] or token < 0 or len(path) == max_path:
            continue
        if accept(child, left.chance(token)):
            path.append(child)
            left = Residual(target_log_probs[child], draft_log_probs[child])
        else:
            left.refuse(token)
    return path, left.weights(target_log_probs[path[-1]], lossless)


def accept_rejection_reference(
    tree: Tree,
    target_log_probs: NodeLogProbs,
    draft_log_probs: NodeLogProbs,
    keys: SeqKeys,
    max_path: int,
    lossless: bool,
) -> tuple[Paths, PathLens, NextTokens]:
    return accepted(walk, tree, target_log_probs, draft_log_probs, keys, max_path, lossless)


@kernel
def _rejection_kernel(
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
    accept_stream,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    first = tl.load(cu_nodes_ptr + seq).to(tl.int64)
    num_nodes = (tl.load(cu_nodes_ptr + seq + 1) - first).to(tl.int32)
    tree = tree_at(first, target_ptr, draft_ptr, tested_ptr, tokens_ptr, parents_ptr, vocab)
    tokens_ptr += first
    parents_ptr += first
    seed = tl.load(seeds_ptr + seq)
    position = tl.load(root_positions_ptr + seq)
    lane = tl.load(sample_idx_ptr + seq) << 15 | accept_stream
    offs_p = tl.arange(0, BLOCK_P)
    path = tl.where(offs_p == 0, 0, -1)
    node = 0
    length = 1
    has_refused = False
    for child in range(1, num_nodes):
        if (tl.load(parents_ptr + child) == node) & (tl.load(tokens_ptr + child) >= 0) & (length < max_path):
            chance = chance_of(tree, node, child, has_refused, 1.0, BLOCK_V)
            has_refused = not accepts(chance, seed, position, child, lane)
            if has_refused:
                refuse(tree, node, child, BLOCK_V)
            else:
                path = tl.where(offs_p == length, child, path)
                node = child
                length += 1
    tl.store(paths_ptr + seq * max_path + offs_p, path, mask=offs_p < max_path)
    tl.store(path_lens_ptr + seq, length)


@op(
    reference=accept_rejection_reference,
    sample=drawn_trees_sample,
    cost=accept_cost,
    typical={"num_seqs": 4, "max_nodes": 16, "vocab": 32000},
    scratch=accept_scratch,
)
def accept_rejection(
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
    """Accepted paths and next tokens; see above for the rule.

    `target_log_probs` and `draft_log_probs` are rows of process_logits for each node, sampled ones (not greedy). A
    draft row is what the node's children were drawn from; a leaf's is not used. A token of probability 0 is never
    accepted. A path of max_path nodes goes no deeper. Not lossless: after a rejection the next token is drawn from the
    node's unmodified target, which biases the output. The next token is -1 only where the target bans everything.

    In fp32. One program per request walks its tree and reads whole rows only after a rejection; the next token is drawn
    by one program per block of the vocabulary.
    """
    launch_accept(
        _rejection_kernel,
        *(paths, path_lens, next_tokens, tested, best_scores, best_ids),
        *(tree, target_log_probs, draft_log_probs, keys, max_path, lossless),
    )
