"""Acceptance by traversal, leaf to root (Traversal Verification, arXiv:2505.12398).

What is emitted is distributed as the target, and paths are no shorter on average than by rejection.

Each node v is reached with a probability a(v): a(root) = 1, and a child x of v has min(1, a(v) * t[x] / d[x]). The
nodes are tested in post-order, children in the order in which they were drawn: first the first leaf. The first test
passed accepts that node's whole path, and the next token is drawn from what t has become there. A node is tested with
what a has become once its children are all refused; refusing v, a child x of p, makes of p

    r = max(a(p) * t - d, 0);  s = sum(r);  t <- r / s;  a(p) <- s / (s + 1 - a(p));  d[x] <- 0, renormalised.

It is lossless because, for any a, t, d at p, the subtree of p is accepted with token y emitted after p with
probability a * t[y]. For its first child is y with probability d[y], and by induction its subtree is accepted with
min(1, a * t[y] / d[y]): together min(d[y], a * t[y]). With m = sum(min(d, a * t)) the child is refused with
probability 1 - m. Then s = a - m, the new a is (a - m) / (1 - m), the new t is max(a * t - d, 0) / (a - m), neither
depends on x, and the next child is drawn from the new d; by induction that gives max(a * t - d, 0)[y] more. The
same holds of what follows y. Whether a node has one more child may depend on all but its draw: that max_path cuts a
path, or that no token is left to draw, is as good an end as a leaf.
"""

from __future__ import annotations

import triton
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
    """As accept_rejection's."""

    def visit(path: list[int], left: Residual) -> tuple[list[int], Tensor] | None:
        """What is accepted in the subtree of the path's last node, which `left` is of."""
        node = path[-1]
        for child, token in enumerate(tokens):
            if parents[child] == node and token >= 0 and len(path) < max_path:
                below = Residual(target_log_probs[child], draft_log_probs[child], left.chance(token))
                if found := visit([*path, child], below):
                    return found
                left.refuse(token)
        return (path, left.weights(target_log_probs[node], lossless)) if accept(node, left.reached) else None

    found = visit([0], Residual(target_log_probs[0], draft_log_probs[0]))
    assert found is not None  # the root's chance stays 1
    return found


def accept_traversal_reference(
    tree: Tree,
    target_log_probs: NodeLogProbs,
    draft_log_probs: NodeLogProbs,
    keys: SeqKeys,
    max_path: int,
    lossless: bool,
) -> tuple[Paths, PathLens, NextTokens]:
    return accepted(walk, tree, target_log_probs, draft_log_probs, keys, max_path, lossless)


@triton.jit
def _next_child(tokens_ptr, parents_ptr, node, after, num_nodes, BLOCK_N: tl.constexpr):
    """The first living child past `after`; num_nodes if there is none."""
    found = num_nodes
    first = after + 1
    while (first < num_nodes) & (found == num_nodes):
        offs_n = first + tl.arange(0, BLOCK_N)
        parents = tl.load(parents_ptr + offs_n, mask=offs_n < num_nodes, other=-1)
        tokens = tl.load(tokens_ptr + offs_n, mask=offs_n < num_nodes, other=-1)
        found = tl.min(tl.where((parents == node) & (tokens >= 0), offs_n, num_nodes), axis=0)
        first += BLOCK_N
    return found


@kernel
def _traversal_kernel(
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
    path = tl.zeros([BLOCK_P], tl.int32)
    node = 0
    length = 1
    reached = 1.0
    refused = 0  # the node's last refused child
    walking = True
    while walking:
        child = num_nodes
        if length < max_path:
            child = _next_child(tokens_ptr, parents_ptr, node, refused, num_nodes, BLOCK_P)
        if child < num_nodes:
            reached = chance_of(tree, node, child, refused > 0, reached, BLOCK_V)
            path = tl.where(offs_p == length, child, path)
            node = child
            length += 1
            refused = 0
        elif accepts(reached, seed, position, node, lane):
            walking = False
        else:
            refused = node
            node = tl.load(parents_ptr + node)
            length -= 1
            reached = refuse(tree, node, refused, BLOCK_V)
    tl.store(paths_ptr + seq * max_path + offs_p, tl.where(offs_p < length, path, -1), mask=offs_p < max_path)
    tl.store(path_lens_ptr + seq, length)


@op(
    reference=accept_traversal_reference,
    sample=drawn_trees_sample,
    cost=accept_cost,
    typical={"num_seqs": 4, "max_nodes": 16, "vocab": 32000},
    scratch=accept_scratch,
)
def accept_traversal(
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
    """Accepted paths and next tokens, of inputs as accept_rejection's; see above for the rule.

    Not lossless: the next token is drawn from the last node's unmodified target, which biases the output.
    """
    launch_accept(
        _traversal_kernel,
        *(paths, path_lens, next_tokens, tested, best_scores, best_ids),
        *(tree, target_log_probs, draft_log_probs, keys, max_path, lossless),
    )
