"""The controller that plans trees: for each request what emits most per millisecond, by acceptance and by costs."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from .acceptance_stats import AcceptanceStats
from .controller import FIRST_PAUSE, LAST_PAUSE
from .cost_table import CostTable
from .early_exit import Calibration, grown, least_survivals, levels_between
from .planner import plan, planned
from .round_times import RoundTimes
from .shape_buckets import shape_buckets
from .tree import ProposedTree, TreeShape

MAX_CHILDREN = 4
FIRST_ROUNDS, LAST_ROUNDS = 16, 128  # after which a request is planned anew; doubles each time
COST_ROUNDS = 64  # after which costs are those of recent rounds
SHARED_ROUNDS = 64  # of all requests, after which the plan that new ones begin with is made anew
PROBE_LENGTH = 2
WORTH = 1.03  # times as many tokens per millisecond as a plan brings, for another to take its place


@dataclass(frozen=True)
class Planning:
    """A shape; it with the trunk as long as it may become; and by depth how probable that must be to be drafted on."""

    shape: TreeShape
    drafted: TreeShape
    exits: tuple[float, ...] = ()


@dataclass
class _Request:
    stats: AcceptanceStats
    planning: Planning = Planning(TreeShape.chain(0), TreeShape.chain(0))
    rounds_left: int = 0
    rounds: int = FIRST_ROUNDS
    planned_for: int = 0  # sequences that ran together
    pause: int = FIRST_PAUSE
    confidences: Seq[float] = ()  # of this round's trunk


class Planned:
    """Shapes of `planner.plan`. `costs` may be replaced at any time, as when they have been measured,
    and follow what rounds take (`RoundTimes`).

    A request begins, alone or in a batch of another size, with what is best by the acceptance of all, and is planned by
    its own after a while: planning takes a good part of a millisecond. Where plain decoding is planned nothing is
    learnt of the draft: after a pause that doubles up to LAST_PAUSE rounds a short chain probes it again.

    A shape's trunk is longer than planned, and how much of a shape is drafted is decided while it is: `early_exit`.

    max_depth: levels at most. node_budget: drafted nodes at most.
    """

    def __init__(self, costs: CostTable, max_depth: int, node_budget: int, max_children: int = MAX_CHILDREN) -> None:
        self.costs, self.buckets = costs, shape_buckets(node_budget, max_depth)
        self._rounds = 0
        self.max_depth, self.node_budget = max_depth, node_budget
        self.calibration = Calibration()
        self.shared = AcceptanceStats(min(max_depth, node_budget), max_children)
        self.probe = TreeShape.chain(min(PROBE_LENGTH, max_depth, node_budget))
        self._requests: dict[int, _Request] = {}
        self._begun_with: dict[
            int, tuple[int, Planning | None]
        ] = {}  # by sequences together: when it was planned, and what
        self._observed = 0

    @property
    def shapes(self) -> Seq[TreeShape]:
        """What a request begins with, and plain decoding."""
        return [TreeShape.chain(0), self.probe, self._planned(self.shared, 1, None).drafted]

    @property
    def costs(self) -> CostTable:
        return self._costs

    @costs.setter
    def costs(self, costs: CostTable) -> None:
        self._costs, self._times = costs, RoundTimes(costs)

    def timed(self, trees: Seq[ProposedTree], draft_ms: float, verify_ms: float) -> None:
        self._times.add(trees, draft_ms, verify_ms)
        self._rounds += 1
        if self._rounds % COST_ROUNDS == 0:
            self._costs = self._times.table()

    @property
    def goes_on(self) -> Planned:
        return self

    @property
    def levels(self) -> int:
        return levels_between(self.costs)

    def __call__(self, seq_id: int, depth: int, confidences: Seq[float]) -> bool:
        """`GoesOn`: whether drafting below a depth pays."""
        known = self._requests[seq_id]
        known.confidences = confidences
        exits = known.planning.exits
        return depth >= len(exits) or self.calibration.survival(confidences) >= exits[depth]

    def _first(self, together: int) -> Planning:
        planned_at, planning = self._begun_with.get(together, (-SHARED_ROUNDS, None))
        if planning is None or self._observed - planned_at >= SHARED_ROUNDS:
            planning = self._planned(self.shared, together, planning)
            self._begun_with[together] = self._observed, planning
        return planning

    def plan(self, request_ids: Seq[int]) -> list[TreeShape]:
        together = 1 << (len(request_ids) - 1).bit_length()
        return [self._next(request_id, together) for request_id in request_ids]

    def _next(self, request_id: int, together: int) -> TreeShape:
        known = self._requests.get(request_id)
        if known is None:
            known = self._requests[request_id] = _Request(self.shared.of_request())
        if known.rounds_left <= 0 or known.planned_for != together:
            begins = known.planned_for != together
            was_native = not begins and known.planning.shape.depth == 0
            known.planning = self._first(together) if begins else self._planned(known.stats, together, known.planning)
            known.planned_for = together
            if known.planning.shape.depth:
                known.rounds_left, known.pause = known.rounds, FIRST_PAUSE
                known.rounds = min(2 * known.rounds, LAST_ROUNDS)
            else:
                known.rounds_left = known.pause
                known.pause = min(2 * known.pause, LAST_PAUSE)
                if was_native:
                    return self.probe
        known.rounds_left -= 1
        return known.planning.drafted

    def _planned(self, stats: AcceptanceStats, together: int, before: Planning | None) -> Planning:
        """The best plan; the one before, if it is hardly worse: a shape that is new here is slow at first."""
        table = stats.table()
        best = plan(table, self.costs, self.buckets, together)
        if before is not None:
            same = planned(before.shape, table, self.costs, together)
            best = best if best.rate > WORTH * same.rate else same
        drafted = grown(best.shape, self.levels, self.max_depth, self.node_budget)
        if self.levels >= drafted.depth:  # nobody asks
            return Planning(best.shape, drafted)
        return Planning(best.shape, drafted, least_survivals(drafted, best.rate, table, self.costs, together))

    def observe(self, request_id: int, tree: ProposedTree, path: Seq[int], emitted: int) -> None:
        known = self._requests.get(request_id)
        if known is None or not tree.depth:
            return
        known.stats.observe(tree.shape, path, emitted, tree.depth)
        self._observed += 1
        reached = tree.shape.on_trunk(path)
        for depth, confidence in enumerate(known.confidences[: min(emitted, reached + 1)]):
            self.calibration.observe(confidence, depth < reached)
        known.confidences = ()

    def forget(self, request_id: int) -> None:
        self._requests.pop(request_id, None)
