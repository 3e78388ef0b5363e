"""What rounds turn out to cost while requests run: corrections to the costs that were measured before."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from statistics import median

from .cost_table import CostTable, Curve
from .tree import ProposedTree

LEAST = 5  # rounds of a kind before it counts


@dataclass
class RoundTimes:
    """Rounds since the last `table`, as shares of what `base` has: verification by rows, drafting over all.

    Medians leave out the rounds in which a program was made. A number of rows that was not run lately is scaled as
    those are that were: a machine that is slower now than when it was measured is slower at all of them.
    """

    base: CostTable
    _verify: dict[int, list[float]] = field(default_factory=dict)
    _draft: list[float] = field(default_factory=list)
    _last: CostTable = field(init=False)

    def __post_init__(self) -> None:
        self._last = self.base

    def add(self, trees: Seq[ProposedTree], draft_ms: float, verify_ms: float) -> None:
        """A round: its trees, as far as they were drafted."""
        rows = sum(len(tree.tokens) - tree.tokens.count(-1) for tree in trees)
        self._verify.setdefault(rows, []).append(verify_ms)
        depth = max(tree.depth for tree in trees)
        if depth:
            frontiers = [sum(len(tree.shape.frontiers[at]) for tree in trees if tree.depth > at) for at in range(depth)]
            self._draft.append(draft_ms / self._expected(frontiers))

    def _expected(self, frontiers: Seq[int]) -> float:
        alike = frontiers[0]
        if all(rows == alike for rows in frontiers):
            return self.base.drafting + len(frontiers) * self.base.draft(alike)
        return self.base.drafting + sum(map(self.base.draft, frontiers))

    def table(self) -> CostTable:
        """The base's costs as they are now; without rounds enough, as they were."""
        shares = {rows: [ms / self.base.verify(rows) for ms in times] for rows, times in self._verify.items()}
        known = {rows: median(of_kind) for rows, of_kind in shares.items() if len(of_kind) >= LEAST}
        if known:
            every = median(share for of_kind in shares.values() for share in of_kind)
            points = {rows: ms * every for rows, ms in self.base.verify.points}
            points |= {rows: self.base.verify(rows) * share for rows, share in known.items()}
            self._last = replace(self._last, verify=Curve(tuple(sorted(points.items()))))
            self._verify.clear()
        if len(self._draft) >= LEAST:
            share = median(self._draft)
            draft = Curve(tuple((rows, ms * share) for rows, ms in self.base.draft.points))
            self._last = replace(self._last, draft=draft, drafting=self.base.drafting * share)
            self._draft.clear()
        return self._last
