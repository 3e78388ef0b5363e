"""How often drafts are accepted, by depth and draw rank, over all requests: what trees are planned from."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from .cost_table import Floats
from .tree import TreeShape

FIRST = 0.6  # acceptance of a first child before anything is known
PRIOR_WEIGHT = 4.0  # observations that FIRST and the depth above count for
DECAY = 0.998  # of an observation's weight with each later one of its depth and rank
TINY = 1e-9


@dataclass
class AcceptanceStats:
    """Exponential averages of acceptance at each depth (0: the root's children) and draw rank, shrunk to a prior.

    What is averaged is whether the child of a rank is accepted where its parent is accepted and its earlier siblings
    are rejected. Only there is it observed: nodes below a rejected one, later siblings of an accepted one, and ranks
    that the shape did not draw are censored, not rejected. The average of a rate r has a standard deviation of
    sqrt(r (1 - r) (1 - DECAY) / (1 + DECAY)), at most 0.016.

    The prior is, at each depth, the estimate of the depth above, and at the first FIRST / (rank + 1): the chance that
    all of k children are rejected then falls as a power of k, as Sequoia measures it (arXiv:2402.12374).

    max_depth, max_children: the table's extent.
    """

    max_depth: int
    max_children: int
    _rates: Floats | None = field(default=None, init=False)  # until something is counted

    def __post_init__(self) -> None:
        self._seen, self._accepted = np.zeros((2, self.max_depth, self.max_children))  # decayed numbers

    def add(self, seen: Floats, accepted: Floats) -> None:
        """Numbers of observations [depth, rank], which need not be whole: some may count for more than others."""
        kept = DECAY**seen
        # The new ones decay too, each with those after it.
        share = np.where(seen > 0, (1 - kept) / (1 - DECAY) / np.maximum(seen, TINY), 0.0)
        self._seen, self._accepted = kept * self._seen + share * seen, kept * self._accepted + share * accepted
        self._rates = None

    def rates(self) -> Floats:
        """[depth, rank]: of the children whose earlier siblings are rejected, how many are accepted."""
        if self._rates is None:
            rates, above = [], [FIRST / (rank + 1) for rank in range(self.max_children)]
            for seen, accepted in zip(self._seen.tolist(), self._accepted.tolist(), strict=True):
                counts = zip(above, accepted, seen, strict=True)
                above = [(PRIOR_WEIGHT * rate + a) / (PRIOR_WEIGHT + s) for rate, a, s in counts]
                rates.append(above)
            self._rates = np.clip(rates, 0, 1)
        return self._rates


@lru_cache(maxsize=4096)
def observed(shape: TreeShape, last: int, until: int, max_depth: int, max_children: int) -> Floats:
    """[2, depth, rank]: what a round showed whose accepted path ends with `last`: children tested, and accepted.

    Nothing counts below the depth `until`: a token past the end of the text was not emitted, and a level that was not
    drafted was not rejected. A planned child that was never drawn, as the draft had no further token, counts as
    rejected: that is what planning it brings.
    """
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


def falling(rates: Floats) -> Floats:
    """[..., rank]: of `rates`, the probability that of an accepted node the child of that rank is the accepted one.

    It does not rise with the rank: of a rank that the averages put above an earlier one, it is the earlier one's.
    """
    found = rates.copy()
    found[..., 1:] *= np.cumprod(1 - rates[..., :-1], -1)
    return np.asarray(np.minimum.accumulate(found, -1))
