"""The controller that plans trees: what emits most per millisecond, by acceptance and by costs."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import ceil

import numpy as np

from .controller import FIRST_PAUSE, LAST_PAUSE
from .cost_table import CostTable, Floats
from .difficulty import PRIOR, Difficulty, Outcome
from .early_exit import Calibration, Questions, least_survivals
from .menu import Menu
from .planner import plan
from .round_times import RoundTimes
from .shape_buckets import shape_buckets
from .tree import ProposedTree, TreeShape

MAX_CHILDREN = 4
PLAN_MS, PLAN_SHARE = 0.1, 0.02  # of the host to make a plan; of native decoding's time, which plans may take
MOST_ROUNDS = 6  # for which a plan holds
EXIT_PLANS = 4  # after which it is weighed anew how sure a draft must be to go on
COST_ROUNDS = 128  # after which costs are those of recent rounds
FIRST_RENEWAL = 512  # rounds of drafting after which the menu may get a tree more; doubles each time
PROBE_LENGTH = 2
PROBE_SHARE = 0.03  # of native decoding's time, which probes may add to it
EASY = 0.05  # of text is easier than what decides whether there are probes
WORTH = 1.03  # times as many tokens per millisecond as a plan brings, for another to take its place
NATIVE = TreeShape.chain(0)


@dataclass
class _Request:
    """belief: about how hard it is to draft for. outcomes, rounds: since then.

    waited, pause: rounds without a draft, and how many there may be. exits: by depth, how probable the trunk must be to
    be drafted on, for a shape and so many plans.
    """

    belief: Floats
    outcomes: list[Outcome] = field(default_factory=list)
    rounds: int = 0
    waited: int = 0
    pause: int = FIRST_PAUSE
    exits: tuple[float, ...] = ()
    exits_for: TreeShape = NATIVE
    exits_left: int = 0
    confidences: Seq[float] = ()  # of this round's trunk


class Planned:
    """Shapes of a `Menu`. `costs` may be replaced at any time, as when they have been measured, and follow what rounds
    take (`RoundTimes`).

    A plan holds for one round, and for up to MOST_ROUNDS where rounds are so short that making it takes PLAN_SHARE. All
    requests of a round that draft have one shape, and those draft whose acceptance makes them worth it: what a draft
    would cost for one that is not is spent on the others' rows. Nothing is learnt of a request without drafts, so it is
    probed after a pause: by what the others draft, or a short chain; unless not even easy text would make it pay, as in
    a batch that fills the device. Pauses double until it is worth drafting for again, but not beyond what keeps the
    time that probes add to native decoding at PROBE_SHARE of it.

    How much of a shape is drafted is decided while it is: `early_exit`.

    max_depth: levels at most. node_budget: drafted nodes at most.
    """

    def __init__(self, costs: CostTable, max_depth: int, node_budget: int, max_children: int = MAX_CHILDREN) -> None:
        self.max_depth, self.max_children = min(max_depth, node_budget), max_children
        self.buckets = shape_buckets(node_budget, max_depth)
        self.probe = TreeShape.chain(min(PROBE_LENGTH, self.max_depth))
        self.difficulty = Difficulty(self.max_depth, max_children)
        self.calibration = Calibration()
        self._requests: dict[int, _Request] = {}
        self._batch, self._planned, self._left = list[int](), list[TreeShape](), 0  # and for how many rounds more
        self.costs = costs
        self._rounds = self._observed = 0
        self._renewal = FIRST_RENEWAL

    @property
    def shapes(self) -> Seq[TreeShape]:
        return [NATIVE, *dict.fromkeys([self.probe, *self.menu.shapes])]

    @property
    def costs(self) -> CostTable:
        return self._costs

    @costs.setter
    def costs(self, costs: CostTable) -> None:
        self._times, self.questions = RoundTimes(costs), Questions.of(costs)
        self._take(Menu.of(self.buckets, costs, self.max_children))
        self._use(costs)

    def _take(self, menu: Menu) -> None:
        self.menu = menu
        self._milliseconds = dict[int, Floats]()  # of the menu's shapes, by sequences
        self._promising = dict[int, bool]()
        self._tokens, self._version = np.empty(0), -1  # and what they bring, by what was seen up to this version
        self._at: int | None = None  # the shape that was planned last
        self._left = 0

    def _use(self, costs: CostTable) -> None:
        self._costs = costs
        self._milliseconds.clear()
        self._promising.clear()
        native, probe = costs.milliseconds(1, 0, 1), costs.milliseconds(self.probe.num_nodes, self.probe.depth, 1)
        self._held = min(ceil(PLAN_MS / PLAN_SHARE / native), MOST_ROUNDS)
        self._longest_pause = min(max(ceil((probe / native - 1) / PROBE_SHARE), FIRST_PAUSE), LAST_PAUSE)

    def timed(self, trees: Seq[ProposedTree], draft_ms: float, verify_ms: float, other_ms: float) -> None:
        self._times.add(trees, draft_ms, verify_ms, other_ms)
        self._rounds += 1
        if self._rounds % COST_ROUNDS == 0:
            self._use(self._times.table())

    @property
    def goes_on(self) -> Planned:
        return self

    @property
    def levels(self) -> int:
        """`GoesOn`: drafted from one question to the next. Programs are made for so many: it does not change."""
        return self.questions.levels

    def __call__(self, seq_id: int, depth: int, confidences: Seq[float]) -> bool:
        """`GoesOn`: whether drafting below a depth pays."""
        request = self._requests[seq_id]
        request.confidences = confidences
        return depth >= len(request.exits) or self.calibration.survival(confidences) >= request.exits[depth]

    def plan(self, request_ids: Seq[int]) -> list[TreeShape]:
        if self._left > 0 and self._batch == request_ids:
            self._left -= 1
            return self._planned
        for request_id in request_ids:
            if request_id not in self._requests:
                self._requests[request_id] = _Request(self.difficulty.prior)
        requests = [self._requests[request_id] for request_id in request_ids]
        for request in requests:
            self._learn(request)
        if self._observed >= self._renewal:
            self._renew()
        self._batch, self._left, self._planned = list(request_ids), self._held - 1, []
        drafting, rate = self._best(requests)
        shape = self.probe if self._at is None else self.menu.shapes[self._at]
        for i, request in enumerate(requests):
            probed = i not in drafting and request.waited >= request.pause and self._may_pay(len(requests))
            if i in drafting:
                request.waited, request.pause = 0, FIRST_PAUSE
            elif probed:
                request.waited, request.pause = 0, min(2 * request.pause, self._longest_pause)
                self._left = 0  # a probe is one round
            self._planned.append(shape if probed or i in drafting else NATIVE)
            if request.exits or self.levels < shape.depth:
                self._set_exits(request, shape if i in drafting else NATIVE, rate, len(drafting))
        return self._planned

    def _best(self, requests: Seq[_Request]) -> tuple[Seq[int], float]:
        """Choose the best of the menu, or what was planned before where that is hardly worse. Which of the requests are
        worth drafting for, and for each of these the tokens per millisecond."""
        count, costs = len(requests), self._costs_of(len(requests))
        if count == 1:
            tokens = requests[0].belief @ self._emitted()  # [shapes]
            rates, native = tokens / costs[1], 1 / costs[0, 0]
            if self._at is not None:
                rates[self._at] *= WORTH
            at = int(rates.argmax())
            drafts = rates[at] > native
            self._at = at if drafts else None
            return ((0,), float(tokens[at] / costs[1, at])) if drafts else ((), native)
        gained = np.stack([request.belief for request in requests]) @ self._emitted() - 1  # [sequences, shapes]
        best_first = np.argsort(-gained, axis=0)
        tokens = np.full(costs.shape, float(count))  # [drafting, shapes]
        tokens[1:] += np.take_along_axis(gained, best_first, 0).cumsum(0)
        rates = tokens / costs
        if self._at is not None:
            rates[1:, self._at] *= WORTH
        drafting, at = divmod(int(rates.argmax()), rates.shape[1])
        self._at = at if drafting else None
        rate = float(tokens[drafting, at] / costs[drafting, at]) / max(1, drafting)
        return best_first[:drafting, at].tolist(), rate

    def _may_pay(self, num_seqs: int) -> bool:
        """Whether any shape would pay if all of so many requests had easy text, of which there is EASY: if not, nothing
        that a probe could show would change the plan, and the drafts' KV need not be kept up.
        """
        if num_seqs not in self._promising:
            costs, easy = self._costs_of(num_seqs), int(np.searchsorted(PRIOR.cumsum(), EASY))  # hazards rise
            gained = self._emitted()[easy] - 1
            drafting = np.arange(num_seqs + 1)[:, None]
            rates = (num_seqs + drafting * gained) / costs
            self._promising[num_seqs] = bool(rates[1:].max() > WORTH * rates[0, 0])
        return self._promising[num_seqs]

    def _set_exits(self, request: _Request, shape: TreeShape, rate: float, drafting: int) -> None:
        request.exits_left -= 1
        if request.exits_for is not shape or request.exits_left <= 0:
            asked = self.levels < shape.depth
            table = self.difficulty.table(request.belief) if asked else ()
            request.exits = least_survivals(shape, rate, table, self.costs, drafting, self.questions) if asked else ()
            request.exits_for, request.exits_left = shape, EXIT_PLANS

    def _emitted(self) -> Floats:
        """[hazards, shapes]: tokens that a round of each emits."""
        if self._version != self.difficulty.version:
            self._tokens, self._version = self.menu.emitted(self.difficulty.chances()), self.difficulty.version
            self._promising.clear()
        return self._tokens

    def _costs_of(self, num_seqs: int) -> Floats:
        if num_seqs not in self._milliseconds:
            self._milliseconds[num_seqs] = self.menu.milliseconds(self.costs, num_seqs)
        return self._milliseconds[num_seqs]

    def _renew(self) -> None:
        """Add the best tree for the requests on average to the menu, where it is better than all that are there."""
        self._renewal *= 2
        belief = np.mean([request.belief for request in self._requests.values()], 0)
        best = plan(self.difficulty.table(belief), self.costs, self.buckets)
        known = (belief @ self._emitted() / self._costs_of(1)[1]).max()
        if best.shape.depth and best.rate > WORTH * known:
            self._take(self.menu.with_shape(best.shape))

    def observe(self, request_id: int, tree: ProposedTree, path: Seq[int], emitted: int) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        request.rounds += 1
        if not tree.depth:
            request.waited += 1
            return
        request.outcomes.append((tree.shape, path[-1], min(emitted, tree.depth)))
        self._observed += 1
        if request.confidences:
            reached = tree.shape.on_trunk(path)
            for depth, confidence in enumerate(request.confidences[: min(emitted, reached + 1)]):
                self.calibration.observe(confidence, depth < reached)
            request.confidences = ()

    def forget(self, request_id: int) -> None:
        if request := self._requests.pop(request_id, None):
            self._learn(request)
            self._left = 0  # another may come by the same number

    def _learn(self, request: _Request) -> None:
        request.belief = self.difficulty.later(request.belief, request.outcomes, request.rounds)
        request.outcomes, request.rounds = [], 0
