"""Recursive rejection without replacement (Sequoia, arXiv:2402.12374; RSD, arXiv:2402.14160).

What is emitted is distributed as the target.

At a node with children x1..xm drawn in that order without replacement from d, against target t: accept a child x with
probability min(1, t[x] / d[x]); after a rejection t <- normalise(max(t - d, 0)) and d[x] <- 0, renormalised. The next
token is drawn from what t has become: the recovered token after a rejection, the bonus token at a leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from .accept_coupled import padded_paths
from .accept_rejection_kernel import accepted_path_kernel, recover_kernel
from .accept_samples import accept_rejection_sample
from .op import op
from .philox import ACCEPT, RECOVER, lane, philox_words, uniforms
from .sample import draw_reference
from .sizes import next_power_of_2
from .types import Cost, NextTokens, NodeLogProbs, NoiseKeys, PathLens, Paths, SeqKeys, Tree

Decision = Callable[[int, float, float], bool]  # of (child, target_prob, draft_prob); see accept_by_philox


def accept_by_philox(seed: int, root_position: int, sample_idx: int) -> Decision:
    """A child is accepted with probability min(1, target_prob / draft_prob), never where target_prob is 0."""

    def accept(child: int, target_prob: float, draft_prob: float) -> bool:
        bits = philox_words(seed, 0, root_position, child, lane(ACCEPT, 0, sample_idx))[0]
        return float(uniforms(torch.tensor(bits))) * draft_prob < target_prob

    return accept


def probabilities(log_probs: Tensor) -> Tensor:
    """Normalised by summing what is left; in log space, so that a remainder below fp32's range still counts."""
    return torch.nan_to_num(log_probs.softmax(-1), nan=0.0)  # nan: nothing is left


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
    path, target, draft_left = [0], probabilities(target_log_probs[0]), draft_log_probs[0]
    for child in range(1, len(tokens)):
        token = tokens[child]
        if parents[child] != path[-1] or token < 0 or len(path) == max_path:
            continue
        draft = probabilities(draft_left)
        taken = accept(child, float(target[token]), float(draft[token]))
        if not taken:
            residual = (target - draft).clamp(min=0)
            total = residual.sum()
            taken = float(total) == 0  # target and draft agree; only rounding could have rejected
        if taken:
            path.append(child)
            target, draft_left = probabilities(target_log_probs[child]), draft_log_probs[child]
        else:
            target = residual / total
            draft_left = draft_left.index_fill(0, torch.tensor(token, device=draft_left.device), float("-inf"))
    return path, target if lossless else probabilities(target_log_probs[path[-1]])


def accept_rejection_reference(
    tree: Tree,
    target_log_probs: NodeLogProbs,
    draft_log_probs: NodeLogProbs,
    keys: SeqKeys,
    max_path: int,
    lossless: bool,
) -> tuple[Paths, PathLens, NextTokens]:
    bounds, tokens, parents = tree.cu_nodes.tolist(), tree.tokens.tolist(), tree.parents.tolist()
    seq_keys = zip(keys.seeds.tolist(), keys.root_positions.tolist(), keys.sample_idx.tolist(), strict=True)
    paths, weights = [], []
    for (first, end), key in zip(pairwise(bounds), seq_keys, strict=True):
        rows = slice(first, end)
        proposed = tokens[rows], parents[rows], target_log_probs[rows], draft_log_probs[rows]
        path, left = walk(*proposed, accept_by_philox(*key), max_path, lossless)
        paths.append(path)
        weights.append(left)
    last = torch.tensor([path[-1] for path in paths], dtype=torch.int32, device=tree.tokens.device)
    noise = NoiseKeys(keys.seeds, keys.root_positions, last, keys.sample_idx, torch.zeros_like(last, dtype=torch.bool))
    next_tokens = draw_reference(torch.stack(weights).log(), noise, 1, RECOVER, False)[:, 0]
    return *padded_paths(paths, max_path, tree.tokens.device), next_tokens


def accept_rejection_cost(
    tree: Tree, target_log_probs: Tensor, draft_log_probs: Tensor, keys: SeqKeys, max_path: int, lossless: bool
) -> Cost:
    """Of a path that meets every node, the most it can be."""
    return Cost(flops=8 * target_log_probs.numel(), bytes=8 * target_log_probs.numel())


def accept_rejection_scratch(
    tree: Tree, target_log_probs: Tensor, draft_log_probs: Tensor, keys: SeqKeys, max_path: int, lossless: bool
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    shape = len(keys.seeds), target_log_probs.shape[1]
    return {"weights": (shape, torch.float32), "left": (shape, torch.float32)}


@op(
    reference=accept_rejection_reference,
    sample=accept_rejection_sample,
    cost=accept_rejection_cost,
    typical={"num_seqs": 4, "max_nodes": 16, "vocab": 32000},
    scratch=accept_rejection_scratch,
)
def accept_rejection(
    paths: Tensor,
    path_lens: Tensor,
    next_tokens: Tensor,
    weights: Tensor,
    left: Tensor,
    tree: Tree,
    target_log_probs: Tensor,
    draft_log_probs: Tensor,
    keys: SeqKeys,
    max_path: int,
    lossless: bool,
) -> None:
    """Accepted paths and next tokens; see above for the rule.

    `target_log_probs` and `draft_log_probs` are rows of process_logits for each node, sampled ones (not greedy). A
    draft row is what the node's children were drawn from; a leaf's is not used. Accept iff u * draft < target, so that
    a token of probability 0 never is; an empty residual accepts. A path of max_path nodes goes no deeper. Not lossless:
    after a rejection the next token is drawn from the node's unmodified target, which biases the output. The next
    token is -1 only where the target bans everything.

    One program per request, in fp32; scratch keeps its node's target weights and what is left of the draft.
    """
    grid, vocab = (len(keys.seeds),), target_log_probs.shape[1]
    accepted_path_kernel[grid](
        paths,
        path_lens,
        weights,
        left,
        tree.cu_nodes,
        tree.tokens,
        tree.parents,
        target_log_probs,
        draft_log_probs,
        keys.seeds,
        keys.root_positions,
        keys.sample_idx,
        vocab,
        max_path,
        ACCEPT,
        BLOCK_P=max(32, next_power_of_2(max_path)),
        BLOCK_V=2048,
        num_warps=16,
    )
    recover_kernel[grid](
        next_tokens,
        paths,
        path_lens,
        weights,
        tree.cu_nodes,
        target_log_probs,
        keys.seeds,
        keys.root_positions,
        keys.sample_idx,
        vocab,
        max_path,
        RECOVER,
        LOSSLESS=lossless,
        BLOCK_V=2048,
        num_warps=16,
    )
