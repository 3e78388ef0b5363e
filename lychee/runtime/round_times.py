"""What rounds turn out to cost while requests run: corrections to the costs that were measured before."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from statistics import median

from .cost_table import CostTable, Curve
from .tree import ProposedTree

KEPT = 33  # last rounds of a kind; their median leaves out those in which a program was made
LEAST = 5  # rounds of a kind before it counts


def _times() -> deque[float]:
    return deque(maxlen=KEPT)


@dataclass
class RoundTimes:
    """Medians of recent rounds, as shares of what `base` has: verification by rows, drafting over all.

    A number of rows that was not run lately is scaled as those are that were: a machine that is slower now than when it
    was measured is slower at all of them.
    """

    base: CostTable
    _verify: dict[int, deque[float]] = field(default_factory=dict)
    _draft: deque[float] = field(default_factory=_times)

    def add(self, trees: Seq[ProposedTree], draft_ms: float, verify_ms: float) -> None:
        """A round: its trees, as far as they were drafted."""
        rows = sum(len(tree.tokens) - tree.tokens.count(-1) for tree in trees)
        self._verify.setdefault(rows, _times()).append(verify_ms / self.base.verify(rows))
        depth = max(tree.depth for tree in trees)
        if depth:
            frontiers = [sum(len(tree.shape.frontiers[at]) for tree in trees if tree.depth > at) for at in range(depth)]
            expected = self.base.drafting + sum(map(self.base.draft, frontiers))
            self._draft.append(draft_ms / expected)

    def table(self) -> CostTable:
        known = {rows: median(times) for rows, times in self._verify.items() if len(times) >= LEAST}
        drafting = median(self._draft) if len(self._draft) >= LEAST else 1.0
        every = median(known.values()) if known else 1.0
        points = {rows: ms * every for rows, ms in self.base.verify.points}
        points |= {rows: self.base.verify(rows) * share for rows, share in known.items()}
        draft = Curve(tuple((rows, ms * drafting) for rows, ms in self.base.draft.points))
        return replace(
            self.base, verify=Curve(tuple(sorted(points.items()))), draft=draft, drafting=self.base.drafting * drafting
        )
