"""What rounds turn out to cost while requests run: corrections to the costs that were measured before."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import median

import numpy as np

from .cost_table import CostTable, Curve
from .tree import ProposedTree, TreeShape

Kind = tuple[TreeShape, int, int]  # of a tree: its shape, the levels drafted, and the nodes that were not drawn

LEAST = 5  # rounds of a kind before it counts
PRIOR_ROUNDS = 1.0  # that the base counts for
LEAST_SHARE = 0.1  # of what the base has


@dataclass
class RoundTimes:
    """Rounds since the last `table`, beside what `base` has: verification by rows, drafting by its levels, the rest.

    Medians leave out the rounds in which a program was made. What was not run lately is put on the line through what
    was (`line`): a machine may be slower now than when it was measured, which is a share of all costs, and requests may
    ask for more than those that were measured with, which every round costs alike. Between numbers of rows that ran,
    none costs more than on the line from one to the other: what is thought too dear never runs, and would stay so.
    """

    base: CostTable
    _rounds: list[tuple[Seq[ProposedTree], float, float, float]] = field(default_factory=list)
    _last: CostTable = field(init=False)

    def __post_init__(self) -> None:
        self._last = self.base
        self._expected = lru_cache(maxsize=64)(self._cost)

    def add(self, trees: Seq[ProposedTree], draft_ms: float, verify_ms: float, other_ms: float) -> None:
        """A round: its trees, as far as they were drafted."""
        self._rounds.append((trees, draft_ms, verify_ms, other_ms))

    def table(self) -> CostTable:
        """The base's costs as they are now; without rounds enough, as they were."""
        verify: dict[int, list[float]] = {}
        draft: dict[float, list[float]] = {}
        for trees, draft_ms, verify_ms, _ in self._rounds:
            rows, expected = self._expected(tuple((t.shape, t.depth, t.tokens.count(-1)) for t in trees))
            verify.setdefault(rows, []).append(verify_ms)
            if expected:
                draft.setdefault(expected, []).append(draft_ms)
        known = {rows: median(times) for rows, times in verify.items() if len(times) >= LEAST}
        if not known:
            return self._last
        begin, share = line([(self.base.verify(rows), ms, len(verify[rows])) for rows, ms in known.items()])
        ran, points = sorted(known), dict(known)
        for rows, ms in self.base.verify.points:
            if rows not in known:
                moved = max(begin + ms * share, LEAST_SHARE * ms)
                between = float(np.interp(rows, ran, [known[r] for r in ran], moved, moved))
                points[rows] = min(moved, between)
        other = median(other_ms for *_, other_ms in self._rounds)
        self._last = replace(self._last, verify=Curve(tuple(sorted(points.items()))), overhead=other)
        drafted = [(at, median(times), len(times)) for at, times in draft.items() if len(times) >= LEAST]
        if drafted:
            begin, share = line(drafted)
            levels = Curve(tuple((rows, ms * share) for rows, ms in self.base.draft.points))
            self._last = replace(self._last, draft=levels, drafting=max(0.0, begin + self.base.drafting * share))
        self._rounds.clear()
        return self._last

    def _cost(self, kind: tuple[Kind, ...]) -> tuple[int, float]:
        """Rows of the target's pass, and milliseconds of drafting."""
        rows = sum(shape.num_nodes - dead for shape, _, dead in kind)
        deepest = max(depth for _, depth, _ in kind)
        frontiers = [sum(len(s.frontiers[at]) for s, depth, _ in kind if depth > at) for at in range(deepest)]
        return rows, self.base.drafting + sum(map(self.base.draft, frontiers)) if deepest else 0.0


def line(points: Seq[tuple[float, float, int]]) -> tuple[float, float]:
    """`begin` and `share` of found = begin + share * base, from (base, found, rounds); at least LEAST_SHARE of it.

    Of rounds that were all alike one half of the difference is taken for each.
    """
    base, found, rounds = np.array(points, float).T
    mean = base.mean()
    terms = np.stack([np.ones_like(base), base / mean], 1)
    squares = (terms.T * rounds) @ terms + PRIOR_ROUNDS * np.eye(2)
    begin, more = np.linalg.solve(squares, (terms.T * rounds) @ ((found - base) / mean))
    return float(begin * mean), max(LEAST_SHARE, float(1 + more))
