"""The controller that plans trees: for each request what emits most per millisecond, by acceptance and by costs."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from .acceptance_stats import AcceptanceStats
from .controller import FIRST_PAUSE, LAST_PAUSE
from .cost_table import CostTable
from .planner import plan
from .shape_buckets import shape_buckets
from .tree import TreeShape

MAX_CHILDREN = 4
FIRST_ROUNDS, LAST_ROUNDS = 16, 64  # after which a request is planned anew; doubles each time
SHARED_ROUNDS = 64  # of all requests, after which the plan that new ones begin with is made anew
STEP = 0.25  # of the log odds, to which acceptance is rounded, so that plans come again
PROBE_LENGTH = 2


def rounded(rate: float) -> float:
    """A probability at a whole number of steps of its log odds."""
    odds = math.log(max(rate, 1e-4) / max(1 - rate, 1e-4))
    return 1 / (1 + math.exp(-STEP * round(odds / STEP)))


@dataclass
class _Request:
    stats: AcceptanceStats
    shape: TreeShape
    rounds_left: int = 0
    rounds: int = FIRST_ROUNDS
    planned_for: int = 0  # sequences that ran together
    pause: int = FIRST_PAUSE


class Planned:
    """Shapes of `planner.plan`. `costs` may be replaced at any time, as when they have been measured.

    A request begins, alone or in a batch of another size, with what is best by the acceptance of all, and is planned by
    its own after a while: planning takes a good part of a millisecond. Where plain decoding is planned nothing is
    learnt of the draft: after a pause that doubles up to LAST_PAUSE rounds a short chain probes it again.

    max_depth: levels at most. node_budget: drafted nodes at most.
    """

    def __init__(self, costs: CostTable, max_depth: int, node_budget: int, max_children: int = MAX_CHILDREN) -> None:
        self.costs, self.buckets = costs, shape_buckets(node_budget, max_depth)
        self.shared = AcceptanceStats(min(max_depth, node_budget), max_children)
        self.probe = TreeShape.chain(min(PROBE_LENGTH, max_depth, node_budget))
        self._requests: dict[int, _Request] = {}
        self._begun_with: dict[int, tuple[int, TreeShape]] = {}  # by sequences together: when it was planned, and what
        self._observed = 0

    @property
    def shapes(self) -> Seq[TreeShape]:
        """What a request begins with, and plain decoding."""
        return [TreeShape.chain(0), self.probe, self._planned(self.shared, 1)]

    def _first(self, together: int) -> TreeShape:
        planned_at, shape = self._begun_with.get(together, (-SHARED_ROUNDS, self.probe))
        if self._observed - planned_at >= SHARED_ROUNDS:
            planned_at, shape = self._begun_with[together] = self._observed, self._planned(self.shared, together)
        return shape

    def plan(self, request_ids: Seq[int]) -> list[TreeShape]:
        together = 1 << (len(request_ids) - 1).bit_length()
        return [self._next(request_id, together) for request_id in request_ids]

    def _next(self, request_id: int, together: int) -> TreeShape:
        known = self._requests.get(request_id)
        if known is None:
            known = self._requests[request_id] = _Request(self.shared.of_request(), TreeShape.chain(0))
        if known.rounds_left <= 0 or known.planned_for != together:
            begins = known.planned_for != together
            was_native = not begins and known.shape.depth == 0
            known.shape = self._first(together) if begins else self._planned(known.stats, together)
            known.planned_for = together
            if known.shape.depth:
                known.rounds_left, known.pause = known.rounds, FIRST_PAUSE
                known.rounds = min(2 * known.rounds, LAST_ROUNDS)
            else:
                known.rounds_left = known.pause
                known.pause = min(2 * known.pause, LAST_PAUSE)
                if was_native:
                    return self.probe
        known.rounds_left -= 1
        return known.shape

    def _planned(self, stats: AcceptanceStats, together: int) -> TreeShape:
        table = tuple(tuple(map(rounded, ranks)) for ranks in stats.table())
        return plan(table, self.costs, self.buckets, together).shape

    def observe(self, request_id: int, shape: TreeShape, path: Seq[int], emitted: int) -> None:
        if shape.depth and request_id in self._requests:
            self._requests[request_id].stats.observe(shape, path, emitted)
            self._observed += 1

    def forget(self, request_id: int) -> None:
        self._requests.pop(request_id, None)
