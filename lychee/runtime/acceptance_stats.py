"""How often drafts are accepted, by depth and draw rank: what trees are planned from."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from .cost_table import Floats
from .planner import Table
from .tree import TreeShape

Outcome = tuple[TreeShape, int, int]  # the accepted path's last node, and the depth down to which it counts

FIRST = 0.6  # acceptance of a first child before anything is known
PRIOR_WEIGHT = 4.0  # observations that FIRST and the depth above count for
SHARED_WEIGHT = 16.0  # observations that all requests' averages count for in one's own
HAZARD_WEIGHT = 2.0  # rejections that being like all requests counts for
TOGETHER = 16  # rounds
TINY = 1e-9
DECAY, SHARED_DECAY = 0.98, 0.998  # of an observation's weight with each later one of its depth and rank


@dataclass
class AcceptanceStats:
    """Exponential averages of acceptance at each depth (0: the root's children) and draw rank, shrunk to a prior.

    What is averaged is whether the child of a rank is accepted where its parent is accepted and its earlier siblings
    are rejected. Only there is it observed: nodes below a rejected one, later siblings of an accepted one, and ranks
    that the shape did not draw are censored, not rejected. The average of a rate r has a standard deviation of
    sqrt(r (1 - r) (1 - decay) / (1 + decay)): at most 0.05 for a request, 0.016 for all together.

    A request's prior are the averages over all requests, `shared`, those of first children to the power of `hazard`:
    how many times as often this request's were rejected. One that is hard to draft for is so at all depths, and of the
    deep ones it shows little. What a request adds to the averages counts likewise as that of one which is neither hard
    nor easy, or they would be, where only easy requests are drafted so deep, those of easy requests.

    The averages' own prior is, at each depth, the estimate of the depth above, and at the first FIRST / (rank + 1): the
    chance that all of k children are rejected then falls as a power of k, as Sequoia measures it (arXiv:2402.12374).

    max_depth, max_children: the table's extent.
    """

    max_depth: int
    max_children: int
    shared: AcceptanceStats | None = None
    _new: list[Outcome] = field(default_factory=list)  # observed, not counted yet
    _rejected: float = 0.0  # first children, and those that would be on the average of all requests
    _expected: float = 0.0
    _rates: Floats | None = None  # of all requests, until something is counted

    def __post_init__(self) -> None:
        self._seen, self._accepted = np.zeros((2, self.max_depth, self.max_children))  # decayed numbers

    def of_request(self) -> AcceptanceStats:
        """Those of a new request; what it observes, these observe too."""
        return AcceptanceStats(self.max_depth, self.max_children, self)

    def observe(self, shape: TreeShape, path: Seq[int], emitted: int, levels: int) -> None:
        """One round: the accepted path's nodes, root first, how many tokens were emitted, and how many levels drafted.

        A token past the end of the text was not emitted, and does not count. A planned child that was never drawn, as
        the draft had no further token, counts as rejected: that is what planning it brings.
        """
        self._new.append((shape, path[-1], min(emitted, levels)))
        if len(self._new) >= TOGETHER:
            self.settle()

    def settle(self) -> None:
        """Count what was observed, which is done for several rounds together. To be called at a request's end."""
        if self._new:
            counts = [_counts(*outcome, self.max_depth, self.max_children) for outcome in self._new]
            self._new.clear()
            self._add(*np.sum(counts, 0))

    def fade(self) -> None:
        """A round in which nothing was drafted: what was seen before it counts for less."""
        self.settle()
        self._seen *= SHARED_DECAY
        self._accepted *= SHARED_DECAY
        self._rejected *= SHARED_DECAY
        self._expected *= SHARED_DECAY

    def _add(self, seen: Floats, accepted: Floats) -> None:
        """Numbers of observations [depth, rank]."""
        if self.shared is None:
            self._average(seen, accepted, SHARED_DECAY)
            return
        kept = DECAY ** seen[:, 0].sum()
        self._rejected = kept * self._rejected + float((seen - accepted)[:, 0].sum())
        self._expected = kept * self._expected + float(seen[:, 0] @ (1 - self.shared.rates()[:, 0]))
        weight = np.ones_like(seen)
        weight[:, 0] = self.hazard
        self.shared._average(seen * weight, seen * weight - (seen - accepted), SHARED_DECAY)
        self._average(seen, accepted, DECAY)

    def _average(self, seen: Floats, accepted: Floats, decay: float) -> None:
        kept = decay**seen
        # The new ones decay too, each with those after it.
        share = np.where(seen > 0, (1 - kept) / (1 - decay) / np.maximum(seen, TINY), 0.0)
        self._rates = None
        self._seen, self._accepted = kept * self._seen + share * seen, kept * self._accepted + share * accepted

    @property
    def hazard(self) -> float:
        """How many times as often as of all requests a first child is rejected of this one."""
        return (HAZARD_WEIGHT + self._rejected) / (HAZARD_WEIGHT + self._expected)

    def rates(self) -> Floats:
        """[depth, rank]: of the children whose earlier siblings are rejected, how many are accepted."""
        self.settle()
        if self.shared:
            prior = self.shared.rates().copy()  # which are kept
            prior[:, 0] **= self.hazard
            return np.asarray((SHARED_WEIGHT * prior + self._accepted) / (SHARED_WEIGHT + self._seen))
        if self._rates is None:
            rates, above = [], [FIRST / (rank + 1) for rank in range(self.max_children)]
            for seen, accepted in zip(self._seen.tolist(), self._accepted.tolist(), strict=True):
                counts = zip(above, accepted, seen, strict=True)
                above = [(PRIOR_WEIGHT * rate + a) / (PRIOR_WEIGHT + s) for rate, a, s in counts]
                rates.append(above)
            self._rates = np.clip(rates, 0, 1)
        return self._rates

    def chances(self) -> Floats:
        """[depth, rank]: the probability that of an accepted node the child of that rank is the accepted one.

        It does not rise with the rank: of a rank that the averages put above an earlier one, it is the earlier one's.
        """
        rates = self.rates()
        found = rates.copy()
        found[:, 1:] *= np.cumprod(1 - rates[:, :-1], 1)
        return np.asarray(np.minimum.accumulate(found, 1))

    def table(self) -> Table:
        """`chances` as the planner takes them."""
        return tuple(map(tuple, self.chances().tolist()))


@lru_cache(maxsize=4096)
def _counts(shape: TreeShape, last: int, until: int, max_depth: int, max_children: int) -> Floats:
    """[2, depth, rank]: what a round showed whose accepted path ends with `last`: children tested, and accepted."""
    counts, path = np.zeros((2, max_depth, max_children)), [last]
    while path[0]:
        path.insert(0, shape.parents[path[0]])
    for depth, node in enumerate(path[: min(until, max_depth)]):
        accepted = shape.ranks[path[depth + 1]] if depth + 1 < len(path) else None
        tested = shape.num_children[node] if accepted is None else accepted + 1
        counts[0, depth, :tested] = 1
        if accepted is not None and accepted < max_children:
            counts[1, depth, accepted] = 1
    return counts
