"""What rounds turn out to cost while requests run: corrections to the costs that were measured before."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import median

from .cost_table import CostTable, Curve
from .tree import ProposedTree, TreeShape

Kind = tuple[TreeShape, int, int]  # of a tree: its shape, the levels drafted, and the nodes that were not drawn

LEAST = 5  # rounds of a kind before it counts


@dataclass
class RoundTimes:
    """Rounds since the last `table`, as shares of what `base` has: verification by rows, drafting over all.

    Medians leave out the rounds in which a program was made. A number of rows that was not run lately is scaled as
    those are that were: a machine that is slower now than when it was measured is slower at all of them.
    """

    base: CostTable
    _rounds: list[tuple[Seq[ProposedTree], float, float]] = field(default_factory=list)
    _last: CostTable = field(init=False)

    def __post_init__(self) -> None:
        self._last = self.base
        self._expected = lru_cache(maxsize=64)(self._cost)

    def add(self, trees: Seq[ProposedTree], draft_ms: float, verify_ms: float) -> None:
        """A round: its trees, as far as they were drafted."""
        self._rounds.append((trees, draft_ms, verify_ms))

    def table(self) -> CostTable:
        """The base's costs as they are now; without rounds enough, as they were."""
        verify: dict[int, list[float]] = {}
        draft: list[float] = []
        for trees, draft_ms, verify_ms in self._rounds:
            rows, expected = self._expected(tuple((t.shape, t.depth, t.tokens.count(-1)) for t in trees))
            verify.setdefault(rows, []).append(verify_ms / self.base.verify(rows))
            if expected:
                draft.append(draft_ms / expected)
        known = {rows: median(shares) for rows, shares in verify.items() if len(shares) >= LEAST}
        if not known:
            return self._last
        every = median(share for shares in verify.values() for share in shares)
        points = {rows: ms * every for rows, ms in self.base.verify.points}
        points |= {rows: self.base.verify(rows) * share for rows, share in known.items()}
        self._last = replace(self._last, verify=Curve(tuple(sorted(points.items()))))
        if len(draft) >= LEAST:
            share = median(draft)
            levels = Curve(tuple((rows, ms * share) for rows, ms in self.base.draft.points))
            self._last = replace(self._last, draft=levels, drafting=self.base.drafting * share)
        self._rounds.clear()
        return self._last

    def _cost(self, kind: tuple[Kind, ...]) -> tuple[int, float]:
        """Rows of the target's pass, and milliseconds of drafting."""
        rows = sum(shape.num_nodes - dead for shape, _, dead in kind)
        deepest = max(depth for _, depth, _ in kind)
        frontiers = [sum(len(s.frontiers[at]) for s, depth, _ in kind if depth > at) for at in range(deepest)]
        return rows, self.base.drafting + sum(map(self.base.draft, frontiers)) if deepest else 0.0
