"""Acceptance: which of the proposed nodes the target keeps, and the token it adds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lychee.kernels import accept_coupled, accept_rejection, accept_traversal, draw, process_logits
from lychee.kernels.philox import TARGET
from lychee.kernels.types import NoiseKeys, SeqKeys, Tree
from lychee.models.batch import on_device

from .inputs import SamplingBatch
from .proposals import Proposals, refuse_undrawn


@dataclass(frozen=True)
class Accepted:
    """Per sequence: the accepted path, root first, and the tokens it emits, the bonus or recovered one last."""

    nodes: tuple[tuple[int, ...], ...]
    rows: tuple[tuple[int, ...], ...]  # the nodes' rows among those of the sequence: others where some nodes are dead
    tokens: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Rule:
    """How sequences are accepted that are neither greedy nor coupled."""

    traversal: bool = False
    lossless: bool = True

    def __call__(
        self, tree: Tree, target_log_probs: Tensor, draft_log_probs: Tensor, keys: SeqKeys, max_path: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        op = accept_traversal if self.traversal else accept_rejection
        return op(tree, target_log_probs, draft_log_probs, keys, max_path, self.lossless)


def accept(proposals: Proposals, logits: Tensor, batch: SamplingBatch, vocab: int, rule: Rule) -> Accepted:
    """Greedy and coupled sequences follow the target's own draws; the others by the rule.

    logits: [num_live_nodes, model_vocab] fp32, the target's, a row per node in the order of `proposals.nodes`.
    """
    nodes = proposals.nodes
    layout = nodes.layout
    assert layout.ancestors is not None
    rows = batch.rows(layout.seq_idx, layout, [tree.tokens for tree in proposals.trees])
    log_probs = process_logits(logits, rows, batch.params, vocab)
    max_path = layout.ancestors.shape[1]
    tree = Tree(
        *(on_device(a, batch.device) for a in (layout.cu_seqlens_q, proposals.tokens[nodes.rows], nodes.parents))
    )
    results = []
    if not all(batch.rejection):
        positions = rows.positions.cpu().numpy() + np.int32(1)
        results.append(
            follow(log_probs, batch.keys(layout.seq_idx, positions, np.zeros_like(positions)), tree, max_path)
        )
    if any(batch.rejection):
        # With one-node trees only there is no draft distribution, and none is read.
        drafted = log_probs if proposals.draft_log_probs is None else proposals.draft_log_probs
        results.append(rule(tree, log_probs, drafted, batch.seq_keys(), max_path))
    paths, lens, following = results[-1]
    if len(results) == 2:
        by_rejection = torch.tensor(batch.rejection, device=lens.device)
        paths = torch.where(by_rejection[:, None], paths, results[0][0])
        lens = torch.where(by_rejection, lens, results[0][1])
        following = torch.where(by_rejection, following, results[0][2])
    return told(proposals, paths.tolist(), lens.tolist(), following.tolist())


def follow(log_probs: Tensor, keys: NoiseKeys, tree: Tree, max_path: int) -> tuple[Tensor, Tensor, Tensor]:
    """What `accept_coupled` gives for the target's own draws after every node."""
    return accept_coupled(tree, draw(log_probs, keys, 1, TARGET, False).flatten(), max_path)


def told(proposals: Proposals, paths: list[list[int]], lens: list[int], following: list[int]) -> Accepted:
    """What an acceptance op gives, in the host's terms. Raises ArithmeticError where nothing could be drawn."""
    refuse_undrawn(following, "target")
    rows = tuple(tuple(path[:n]) for path, n in zip(paths, lens, strict=True))
    kept = rows if proposals.all_live else proposals.nodes.ids(rows)
    tokens = tuple(
        (*(t.tokens[node] for node in path[1:]), token)
        for t, path, token in zip(proposals.trees, kept, following, strict=True)
    )
    return Accepted(kept, rows, tokens)
