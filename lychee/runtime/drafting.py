"""A round's trees while they are drafted, segment by segment."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lychee.models.layout import Ints, ints

from .draft_loop import Drawn
from .inputs import SamplingBatch
from .nodes import Segment
from .proposals import Proposals, refuse_undrawn
from .tree import ProposedTree, TreeShape


@dataclass(eq=False)
class Drafting:
    """Tokens of each sequence's tree, -1 where none is drawn, and how many levels are; all lists are by sequence.

    sure: confidences of the trunk's nodes whose children are drawn, where they were asked for.
    """

    shapes: Seq[TreeShape]
    tokens: list[Ints]
    levels: list[int]
    sure: list[list[float]]
    log_probs: Tensor | None = None
    _with_children: list[Ints] = field(default_factory=list)  # rows of log_probs that are known

    @staticmethod
    def start(batch: SamplingBatch, shapes: Seq[TreeShape]) -> Drafting:
        tokens = [np.full(shape.num_nodes, -1, np.int32) for shape in shapes]
        for seq, mine in zip(batch.seqs, tokens, strict=True):
            mine[0] = seq.tokens[-1]
        return Drafting(shapes, tokens, [0] * len(shapes), [[] for _ in shapes])

    def tokens_of(self, active: tuple[int, ...]) -> Ints:
        """Of all nodes of these sequences, one after the other."""
        return np.concatenate([self.tokens[i] for i in active])

    def add(self, active: tuple[int, ...], segment: Segment, drawn: Drawn, vocab: int) -> None:
        """What a segment has drawn for these sequences."""
        plan, tokens = segment.plan, self.tokens_of(active)
        tokens[segment.nodes] = drawn.tokens[segment.drawn_at]
        if tokens[segment.nodes].min() < 0:
            refuse_undrawn(plan.bury(tokens, segment.last), "draft")
        for i, first, end in zip(active, plan.cu_nodes.tolist(), plan.cu_nodes[1:].tolist(), strict=False):
            self.tokens[i] = tokens[first:end]
            self.levels[i] = min(segment.last, self.shapes[i].depth)
        for level, sure in zip(segment.levels, drawn.confidences, strict=False):
            firsts = level.frontier.cu_seqlens_q.tolist()  # the trunk's node is the first of its level
            for i, row, end in zip(active, firsts, firsts[1:], strict=False):
                if row < end:
                    self.sure[i].append(float(sure[row]))
        if drawn.log_probs:
            self._keep(active, segment, drawn.log_probs, vocab)

    def _keep(self, active: tuple[int, ...], segment: Segment, levels: Seq[Tensor], vocab: int) -> None:
        first = np.cumsum([0, *(shape.num_nodes for shape in self.shapes)])
        if self.log_probs is None:
            self.log_probs = levels[0].new_empty(int(first[-1]), vocab)
        for level, log_probs in zip(segment.levels, levels, strict=True):
            nodes = first[ints(active)[level.frontier.seq_idx]] + level.frontier.nodes
            self.log_probs[torch.from_numpy(nodes).to(log_probs.device)] = log_probs
            self._with_children.append(nodes)

    def proposals(self) -> Proposals:
        trees = zip(self.shapes, self.tokens, self.levels, strict=True)
        proposals = Proposals(tuple(ProposedTree(s, tuple(t.tolist()), n) for s, t, n in trees))
        if self.log_probs is None:
            return proposals
        rows = proposals.nodes.rows
        leaves = np.setdiff1d(rows, np.concatenate(self._with_children))
        self.log_probs[torch.from_numpy(leaves).to(self.log_probs.device)] = 0.0
        if np.array_equal(rows, np.arange(len(rows))):
            kept = self.log_probs[: len(rows)]
        else:
            kept = self.log_probs[torch.from_numpy(rows).to(self.log_probs.device)]
        return Proposals(proposals.trees, kept)
