"""Acceptance: which of the proposed nodes the target keeps, and the token it adds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lychee.kernels import accept_coupled, accept_rejection, draw, process_logits
from lychee.kernels.philox import TARGET
from lychee.kernels.types import NoiseKeys, Tree

from .drafter import Proposals, refuse_undrawn
from .inputs import SamplingBatch


@dataclass(frozen=True)
class Accepted:
    """Per sequence: the accepted path's nodes, root first, and the tokens it emits, the bonus or recovered one last."""

    paths: Tensor  # [num_seqs, max_path] int32, -1 past the end
    nodes: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]


def accept(proposals: Proposals, logits: Tensor, batch: SamplingBatch, vocab: int, lossless: bool) -> Accepted:
    """Greedy and coupled sequences follow the target's own draws; the others go through the rejection test.

    logits: [num_nodes, model_vocab] fp32, the target's, a row per node in the order of `proposals.trees`.
    """
    trees = proposals.trees
    nodes = [(i, tree, node) for i, tree in enumerate(trees) for node in range(tree.shape.num_nodes)]
    rows = batch.rows(nodes)
    log_probs = process_logits(logits, rows, batch.params, vocab)
    tree, max_path = batch.tree(trees), 1 + max(t.shape.depth for t in trees)
    results = []
    if not all(batch.rejection):
        keys = batch.keys([i for i, _, _ in nodes], rows.positions.cpu().numpy() + 1, [0] * len(nodes))
        results.append(follow(log_probs, keys, tree, max_path))
    if any(batch.rejection):
        # With one-node trees only there is no draft distribution, and none is read.
        draft_log_probs = log_probs if proposals.draft_log_probs is None else proposals.draft_log_probs
        results.append(accept_rejection(tree, log_probs, draft_log_probs, batch.seq_keys(), max_path, lossless))
    paths, lens, following = results[-1]
    if len(results) == 2:
        by_rejection = torch.tensor(batch.rejection, device=lens.device)
        paths = torch.where(by_rejection[:, None], paths, results[0][0])
        lens = torch.where(by_rejection, lens, results[0][1])
        following = torch.where(by_rejection, following, results[0][2])
    return told(proposals, paths, lens, following)


def follow(log_probs: Tensor, keys: NoiseKeys, tree: Tree, max_path: int) -> tuple[Tensor, Tensor, Tensor]:
    """What `accept_coupled` gives for the target's own draws after every node."""
    return accept_coupled(tree, draw(log_probs, keys, 1, TARGET, False).flatten(), max_path)


def told(proposals: Proposals, paths: Tensor, lens: Tensor, following: Tensor) -> Accepted:
    """What an acceptance op gives, in the host's terms. Raises ArithmeticError where nothing could be drawn."""
    trees, drawn = proposals.trees, following.tolist()
    refuse_undrawn(drawn, "target")
    kept = tuple(tuple(path[:n]) for path, n in zip(paths.tolist(), lens.tolist(), strict=True))
    tokens = tuple(
        (*(t.tokens[node] for node in path[1:]), token) for t, path, token in zip(trees, kept, drawn, strict=True)
    )
    return Accepted(paths, kept, tokens)
