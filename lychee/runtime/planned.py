"""The controller that plans trees: what emits most per millisecond, by acceptance and by costs."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from .acceptance_stats import AcceptanceStats
from .controller import FIRST_PAUSE, LAST_PAUSE
from .cost_table import CostTable, Floats
from .early_exit import Calibration, least_survivals, levels_between
from .menu import Menu
from .planner import plan
from .round_times import RoundTimes
from .shape_buckets import shape_buckets
from .tree import ProposedTree, TreeShape

MAX_CHILDREN = 4
ROUNDS = 16  # after which a batch is planned anew
COST_ROUNDS = 64  # after which costs are those of recent rounds
FIRST_RENEWAL = 512  # rounds of drafting after which the menu may get a tree more; doubles each time
PROBE_LENGTH = 2
WORTH = 1.02  # times as many tokens per millisecond as a plan brings, for another to take its place


@dataclass(frozen=True)
class Planning:
    """What the requests of a batch draft: each `shape` or nothing.

    exits: of each request that drafts, by depth, how probable the trunk must be to be drafted on.
    """

    shape: TreeShape
    exits: dict[int, tuple[float, ...]]


NATIVE = Planning(TreeShape.chain(0), {})


@dataclass
class _Request:
    stats: AcceptanceStats
    confidences: Seq[float] = ()  # of this round's trunk


class Planned:
    """Shapes of a `Menu`. `costs` may be replaced at any time, as when they have been measured, and follow what rounds
    take (`RoundTimes`).

    All requests of a round that draft have one shape, and those draft whose acceptance makes them worth it: what a
    draft would cost for one that is not is spent on the others' rows. A request begins with the acceptance of all.
    Where plain decoding is planned nothing is learnt of the draft: after a pause that doubles up to LAST_PAUSE rounds a
    short chain probes it again. What was seen of a request that is left out counts for less and less.

    How much of a shape is drafted is decided while it is: `early_exit`.

    max_depth: levels at most. node_budget: drafted nodes at most.
    """

    def __init__(self, costs: CostTable, max_depth: int, node_budget: int, max_children: int = MAX_CHILDREN) -> None:
        self.max_depth, self.max_children = min(max_depth, node_budget), max_children
        self.buckets = shape_buckets(node_budget, max_depth)
        self.costs = costs
        self.calibration = Calibration()
        self.shared = AcceptanceStats(self.max_depth, max_children)
        self.probe = TreeShape.chain(min(PROBE_LENGTH, self.max_depth))
        self._requests: dict[int, _Request] = {}
        self._batch: tuple[int, ...] = ()  # for which `_planning` is, for `_left` rounds more
        self._planning, self._left = NATIVE, 0
        self._pause, self._probed = FIRST_PAUSE, True  # `_pause` is the next one's; whether a probe followed the last
        self._rounds = self._observed = 0
        self._renewal = FIRST_RENEWAL

    @property
    def shapes(self) -> Seq[TreeShape]:
        return [TreeShape.chain(0), *dict.fromkeys([self.probe, *self.menu.shapes])]

    @property
    def costs(self) -> CostTable:
        return self._costs

    @costs.setter
    def costs(self, costs: CostTable) -> None:
        self._times = RoundTimes(costs)
        self._use(costs)
        self.menu = Menu.of(self.buckets, costs, self.max_children)

    def _use(self, costs: CostTable) -> None:
        self._costs, self._milliseconds = costs, dict[int, Floats]()  # of the menu's shapes, by sequences
        self.levels = levels_between(costs)

    def timed(self, trees: Seq[ProposedTree], draft_ms: float, verify_ms: float) -> None:
        self._times.add(trees, draft_ms, verify_ms)
        self._rounds += 1
        if self._rounds % COST_ROUNDS == 0:
            self._use(self._times.table())

    @property
    def goes_on(self) -> Planned:
        return self

    def __call__(self, seq_id: int, depth: int, confidences: Seq[float]) -> bool:
        """`GoesOn`: whether drafting below a depth pays."""
        self._requests[seq_id].confidences = confidences
        exits = self._planning.exits.get(seq_id, ())
        return depth >= len(exits) or self.calibration.survival(confidences) >= exits[depth]

    def plan(self, request_ids: Seq[int]) -> list[TreeShape]:
        for request_id in request_ids:
            if request_id not in self._requests:
                self._requests[request_id] = _Request(self.shared.of_request())
        if self._left <= 0 and not self._probed:
            self._probed = True
            return [self.probe] * len(request_ids)
        if self._left <= 0 or self._batch != tuple(request_ids):
            self._batch, self._planning = tuple(request_ids), self._planned(request_ids)
            if self._planning.exits:
                self._left, self._pause = ROUNDS, FIRST_PAUSE
            elif self._left <= 0:
                self._left, self._pause, self._probed = self._pause, min(2 * self._pause, LAST_PAUSE), False
        self._left -= 1
        planning = self._planning
        return [planning.shape if i in planning.exits else TreeShape.chain(0) for i in request_ids]

    def _planned(self, request_ids: Seq[int]) -> Planning:
        """The best of the menu, or what was planned before where that is hardly worse."""
        if self._observed >= self._renewal:
            self._renew()
        costs = self._costs_of(len(request_ids))
        stats = [self._requests[request_id].stats for request_id in request_ids]
        gained = np.array([self.menu.emitted(known.chances()) - 1 for known in stats])  # [sequences, shapes]
        best_first = np.argsort(-gained, axis=0)
        sums = np.take_along_axis(gained, best_first, 0).cumsum(0)
        tokens = len(request_ids) + np.concatenate([np.zeros((1, sums.shape[1])), sums])
        rates = tokens / costs  # [drafting, shapes]
        weighed, before = rates.copy(), self._planning.shape
        if before in self.menu.shapes:
            weighed[1:, self.menu.shapes.index(before)] *= WORTH
        drafting, at = map(int, np.unravel_index(np.argmax(weighed), rates.shape))
        if not drafting:
            return NATIVE
        shape = self.menu.shapes[at]
        rate, exits = float(rates[drafting, at]) / drafting, {}
        for i in best_first[:drafting, at].tolist():
            asked = self.levels < shape.depth
            least = least_survivals(shape, rate, stats[i].table(), self.costs, drafting) if asked else ()
            exits[request_ids[i]] = least
        return Planning(shape, exits)

    def _costs_of(self, num_seqs: int) -> Floats:
        if num_seqs not in self._milliseconds:
            self._milliseconds[num_seqs] = self.menu.milliseconds(self.costs, num_seqs)
        return self._milliseconds[num_seqs]

    def _renew(self) -> None:
        """Add the best tree by what all requests have shown to the menu, where it is better than all that are there."""
        self._renewal *= 2
        best = plan(self.shared.table(), self.costs, self.buckets)
        known = (self.menu.emitted(self.shared.chances()) / self._costs_of(1)[1]).max()
        if best.shape.depth and best.rate > WORTH * known:
            self.menu = self.menu.with_shape(best.shape)
            self._milliseconds.clear()

    def observe(self, request_id: int, tree: ProposedTree, path: Seq[int], emitted: int) -> None:
        known = self._requests.get(request_id)
        if known is None:
            return
        if not tree.depth:
            known.stats.fade()
            return
        known.stats.observe(tree.shape, path, emitted, tree.depth)
        self._observed += 1
        if known.confidences:
            reached = tree.shape.on_trunk(path)
            for depth, confidence in enumerate(known.confidences[: min(emitted, reached + 1)]):
                self.calibration.observe(confidence, depth < reached)
            known.confidences = ()

    def forget(self, request_id: int) -> None:
        if known := self._requests.pop(request_id, None):
            known.stats.settle()
