"""Early exit: while a tree is drafted, whether drafting its next levels still pays."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from .cost_table import CostTable
from .planner import Table, expected
from .tree import TreeShape

BINS = 16  # of confidence
PRIOR_WEIGHT = 4.0  # observations that a bin's own confidence counts for
DECAY = 0.998  # of an observation's weight with each later one of its bin
ASK = 2.0  # times what drafting costs besides its levels, that each question costs: a program is begun, and Python
ASK_SHARE = 0.05  # of the drafting between two questions that they may cost


@dataclass
class Calibration:
    """How often a draft that is so sure of its next token is right: averages by confidence, shrunk to it.

    A draft's largest probability is no acceptance rate: it may be too sure, or not sure enough, and what is accepted
    depends on the rule and the temperature too.
    """

    _seen: list[float] = field(default_factory=lambda: [0.0] * BINS)
    _accepted: list[float] = field(default_factory=lambda: [0.0] * BINS)

    def rate(self, confidence: float) -> float:
        at = _bin(confidence)
        return (PRIOR_WEIGHT * confidence + self._accepted[at]) / (PRIOR_WEIGHT + self._seen[at])

    def observe(self, confidence: float, accepted: bool) -> None:
        at = _bin(confidence)
        self._seen[at] = DECAY * self._seen[at] + 1
        self._accepted[at] = DECAY * self._accepted[at] + accepted

    def survival(self, confidences: Seq[float]) -> float:
        """The probability that a path is accepted whose nodes' parents are so sure."""
        return math.prod(map(self.rate, confidences))


def _bin(confidence: float) -> int:
    return min(int(confidence * BINS), BINS - 1)


@dataclass(frozen=True)
class Questions:
    """levels: how many are drafted from one to the next, so that asking costs a small share of them. ms: of one."""

    levels: int
    ms: float

    @staticmethod
    def of(costs: CostTable) -> Questions:
        """By costs of rounds in which none was asked: in others they are part of what levels cost."""
        ms = ASK * costs.drafting
        return Questions(max(1, math.ceil(ms / (ASK_SHARE * max(costs.draft(1), 1e-3)))), ms)


def least_survivals(
    shape: TreeShape, rate: float, accept: Table, costs: CostTable, num_seqs: int, questions: Questions
) -> tuple[float, ...]:
    """By depth, how probably the trunk must be accepted down to there for drafting on to pay.

    It pays if for some number of further levels the tokens that they are expected to bring, by `accept` (a Table of the
    planner), are at least `rate` to the millisecond. Nodes below the trunk's node of that depth bring what they do in
    proportion to its probability, the others in any case.
    """
    reach, trunk = expected(shape, accept), shape.trunk
    rows = [sum(1 for at in shape.depths if at <= depth) for depth in range(shape.depth + 1)]
    cost = [costs.milliseconds(n, depth, shape.width, num_seqs) / num_seqs for depth, n in enumerate(rows)]
    found = []
    for depth in range(shape.depth):
        below, least = _below(shape, trunk[depth]), math.inf
        for end in range(depth + 1, shape.depth + 1):
            new = [node for node, at in enumerate(shape.depths) if depth < at <= end]
            others = sum(reach[node] for node in new if node not in below)
            asked = -(-(end - depth) // questions.levels) * questions.ms / num_seqs
            wanted = rate * num_seqs * (cost[end] - cost[depth] + asked) - others
            brought = sum(reach[node] for node in new if node in below)
            if wanted <= 0:
                least = 0.0
            elif brought > 0:
                least = min(least, wanted * reach[trunk[depth]] / brought)
        found.append(least)
    return tuple(found)


def _below(shape: TreeShape, top: int) -> set[int]:
    """All nodes under one."""
    found = {top}
    for node, parent in enumerate(shape.parents):
        if parent in found:
            found.add(node)
    return found - {top}
