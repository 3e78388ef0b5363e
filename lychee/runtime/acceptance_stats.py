"""How often drafts are accepted, by depth and draw rank: what trees are planned from."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from .planner import Table
from .tree import TreeShape

FIRST = 0.6  # acceptance of a first child before anything is known
PRIOR_WEIGHT = 4.0  # observations that FIRST and the depth above count for
SHARED_WEIGHT = 16.0  # observations that all requests' averages count for in one's own
DECAY, SHARED_DECAY = 0.98, 0.998  # of an observation's weight with each later one of its depth and rank


@dataclass
class AcceptanceStats:
    """Exponential averages of acceptance at each depth (0: the root's children) and draw rank, shrunk to a prior.

    What is averaged is whether the child of a rank is accepted where its parent is accepted and its earlier siblings
    are rejected. Only there is it observed: nodes below a rejected one, later siblings of an accepted one, and ranks
    that the shape did not draw are censored, not rejected. The average of a rate r has a standard deviation of
    sqrt(r (1 - r) (1 - decay) / (1 + decay)): at most 0.05 for a request, 0.016 for all together.

    A request's prior are the averages over all requests, `shared`. Theirs is, at each depth, the estimate of the depth
    above, and at the first FIRST / (rank + 1): the chance that all of k children are rejected then falls as a power of
    k, as Sequoia measures it (arXiv:2402.12374).

    max_depth, max_children: the table's extent.
    """

    max_depth: int
    max_children: int
    shared: AcceptanceStats | None = None
    _seen: list[list[float]] = field(init=False)  # decayed number of observations, by depth and rank
    _accepted: list[list[float]] = field(init=False)

    def __post_init__(self) -> None:
        self._seen = [[0.0] * self.max_children for _ in range(self.max_depth)]
        self._accepted = [[0.0] * self.max_children for _ in range(self.max_depth)]

    def of_request(self) -> AcceptanceStats:
        """Those of a new request; what it observes, these observe too."""
        return AcceptanceStats(self.max_depth, self.max_children, self)

    def observe(self, shape: TreeShape, path: Seq[int], emitted: int, levels: int) -> None:
        """One round: the accepted path's nodes, root first, how many tokens were emitted, and how many levels drafted.

        A token past the end of the text was not emitted, and does not count. A planned child that was never drawn, as
        the draft had no further token, counts as rejected: that is what planning it brings.
        """
        for depth, node in enumerate(path[: min(emitted, levels, self.max_depth)]):
            accepted = shape.ranks[path[depth + 1]] if depth + 1 < len(path) else None
            drawn = shape.num_children[node] if accepted is None else accepted + 1
            for rank in range(min(drawn, self.max_children)):
                self._add(depth, rank, rank == accepted)

    def fade(self) -> None:
        """A round in which nothing was drafted: what was seen before it counts for less."""
        for row in (*self._seen, *self._accepted):
            row[:] = [SHARED_DECAY * value for value in row]

    def _add(self, depth: int, rank: int, accepted: bool) -> None:
        decay = DECAY if self.shared else SHARED_DECAY
        self._seen[depth][rank] = decay * self._seen[depth][rank] + 1
        self._accepted[depth][rank] = decay * self._accepted[depth][rank] + accepted
        if self.shared:
            self.shared._add(depth, rank, accepted)

    def rates(self) -> list[list[float]]:
        """[depth][rank]: of the children whose earlier siblings are rejected, how many are accepted."""
        above = [FIRST / (rank + 1) for rank in range(self.max_children)]
        priors, weight = (self.shared.rates(), SHARED_WEIGHT) if self.shared else (None, PRIOR_WEIGHT)
        rates = []
        for depth, (seen, accepted) in enumerate(zip(self._seen, self._accepted, strict=True)):
            prior = priors[depth] if priors else above
            above = [(weight * rate + a) / (weight + s) for rate, a, s in zip(prior, accepted, seen, strict=True)]
            rates.append(above)
        return rates

    def table(self) -> Table:
        """[depth][rank]: the probability that of an accepted node the child of that rank is the accepted one.

        It does not rise with the rank: ranks that the averages put the wrong way round share their mean.
        """
        return tuple(falling(chances(rates)) for rates in self.rates())


def chances(rates: Seq[float]) -> list[float]:
    """Of each rank, that it is accepted and all before it are rejected."""
    found, left = [], 1.0
    for rate in rates:
        found.append(left * rate)
        left *= 1 - rate
    return found


def falling(values: Seq[float]) -> tuple[float, ...]:
    """The nearest values, in least squares, that do not rise: neighbours that do are pooled. Their sum stays."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and pools[-2][0] < pools[-1][0]:
            pool = pools.pop(-2) + pools.pop()
            pools.append([sum(pool) / len(pool)] * len(pool))
    return tuple(value for pool in pools for value in pool)
