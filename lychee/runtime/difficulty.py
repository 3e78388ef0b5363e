"""How hard a request's text is to draft for just now: a distribution, from which acceptance follows."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from .acceptance_stats import AcceptanceStats, falling, observed
from .cost_table import Floats
from .planner import Table
from .tree import TreeShape

HAZARDS: Floats = 2.0 ** np.arange(-4.0, 6.5, 0.5)
SPREAD = 1.5  # octaves of hazard by which stretches of text differ: a standard deviation
CHANGES = 1 / 64  # of rounds: those before which another stretch begins
TOGETHER, MOST_TOGETHER = 16, 64  # rounds, after which what they showed counts for all requests: it doubles
PRIOR: Floats = np.exp(-0.5 * (np.log2(HAZARDS) / SPREAD) ** 2)
PRIOR /= PRIOR.sum()
ASSUMED = 200.0  # rounds that PRIOR counts for
LEAST = 1e-9  # of a probability that is neither 0 nor 1


Outcome = tuple[TreeShape, int, int]
"""Of a round: its shape, the accepted path's last node, and the depth down to which it counts: what was emitted of the
text, and drafted of the shape.
"""


class Difficulty:
    """First children are accepted at the rates of all requests to the power of the text's hazard: where a draft is bad,
    it is bad at all depths. Of a request there is a belief about its hazard, probabilities of HAZARDS, by Bayes' rule
    from what was accepted. Text changes: before each round there is a chance that the hazard is drawn anew, from
    `prior`: the mean of all beliefs so far. So steady text is known ever better, and a change is noticed within the few
    rounds that were improbable without it. While the hazard is not known, what is accepted so deep is probably easy,
    and the next token is likelier to be accepted too.

    What all requests have shown, `stats`, is what one of hazard 1 would: a rejection that was expected twice as much
    counts for half. Else deep rates, which only easy text shows, would be those of easy text.

    max_depth, max_children: the tables' extent. version: rises when what all requests have shown is used anew.
    """

    def __init__(self, max_depth: int, max_children: int) -> None:
        self.stats = AcceptanceStats(max_depth, max_children)
        self.version = 0
        self._together = TOGETHER
        self.prior, self._believed = PRIOR, ASSUMED * PRIOR  # of new text's hazard; and the sum of all beliefs
        self._new: list[tuple[Floats, Floats]] = []  # beliefs, and what was seen under them and is not counted yet
        self._use()

    def _use(self) -> None:
        rates = np.clip(self.stats.rates()[:, 0], LEAST, 1 - LEAST)
        self._accepts = HAZARDS[:, None] * np.log(rates)  # [hazards, depth], logarithms
        rejects = -np.expm1(self._accepts)
        self._rejects = np.log(np.maximum(rejects, LEAST))
        reached = np.exp(np.cumsum(self._accepts, 1) - self._accepts)
        self._outcomes = np.concatenate([reached * rejects, reached], 1)  # [hazards, 2 depth]
        self._rejected_at_one = 1 - rates
        self._known: dict[Outcome, tuple[Floats, Floats]] = {}
        self.version += 1

    def later(self, belief: Floats, outcomes: Seq[Outcome], rounds: int) -> Floats:
        """The belief after so many rounds, of which those that drafted had these outcomes."""
        for outcome in outcomes:
            known = self._known.get(outcome)
            if known is None:
                known = self._known[outcome] = self._likelihood(*outcome)
            self._new.append((belief, known[0]))
            belief = belief * known[1]
        belief = belief / belief.sum()
        self._believed = self._believed + len(outcomes) * belief
        if len(self._new) >= self._together:
            self._settle()
            self._together = min(2 * self._together, MOST_TOGETHER)
        same = (1 - CHANGES) ** rounds
        return np.asarray(belief * same + (1 - same) * self.prior)

    def _likelihood(self, shape: TreeShape, last: int, until: int) -> tuple[Floats, Floats]:
        """What a round showed, and how probable that is by hazard."""
        counts = observed(shape, last, until, self.stats.max_depth, self.stats.max_children)
        seen, accepted = counts[:, :, 0]
        likelihood = np.exp(self._accepts @ accepted + self._rejects @ (seen - accepted))
        return counts, np.maximum(likelihood, LEAST)

    def _settle(self) -> None:
        """Count what was observed for all requests, as is done for several rounds together."""
        beliefs, counts = map(np.stack, zip(*self._new, strict=True))
        self._new.clear()
        more = self._rejected(beliefs) / self._rejected_at_one - 1
        total = counts.sum(0)
        total[:, :, 0] += (counts[:, 0, :, 0] * more).sum(0)
        self.stats.add(*total)
        self.prior = self._believed / self._believed.sum()
        self._use()

    def _rejected(self, belief: Floats) -> Floats:
        """[..., depth]: of the first children whose parents are accepted, how many are to be rejected."""
        rejected, reached = np.split(belief @ self._outcomes, 2, -1)
        return np.asarray(rejected / np.maximum(reached, LEAST))

    def chances(self) -> Floats:
        """[hazards, depth, rank]: how probably the child of that rank of an accepted node is the accepted one."""
        rates = np.repeat(self.stats.rates()[None], len(HAZARDS), 0)
        rates[:, :, 0] = np.exp(self._accepts)
        return falling(rates)

    def table(self, belief: Floats) -> Table:
        """As the planner takes it, of a request: at each depth of text that was accepted so far."""
        rates = self.stats.rates().copy()
        rates[:, 0] = 1 - self._rejected(belief)
        return tuple(map(tuple, falling(rates).tolist()))
