"""What a round costs: milliseconds by number of rows, between points that were measured."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Milliseconds of a pass by its number of rows, linear between the measured points (rows, ms).

    It never falls: where a point is below an earlier one, it is the measurement that is noisy. Below the first point it
    is flat; past the last it grows in proportion to the rows, which is more than any pass does that has not yet filled
    the device, so nothing is planned on a cost that nobody measured and that came out too low.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        rows = [at for at, _ in self.points]
        if (
            not rows
            or rows[0] < 1
            or sorted(set(rows)) != rows
            or not all(0 < ms < float("inf") for _, ms in self.points)
        ):
            raise ValueError(
                f"points is {self.points}, must have rising numbers of rows and finite milliseconds above 0"
            )

    def of(self, rows: NDArray[Any]) -> Floats:
        """As a call, of many numbers of rows."""
        at, ms = self._rising
        return np.asarray(np.interp(rows, at, ms) * np.maximum(1.0, rows / at[-1]))

    @cached_property
    def _rising(self) -> tuple[list[int], list[float]]:
        return [at for at, _ in self.points], list(accumulate((ms for _, ms in self.points), max))

    def __call__(self, rows: int) -> float:
        at, ms = self._rising
        i = bisect_left(at, rows)
        if i == len(at):
            return ms[-1] * rows / at[-1]
        if i == 0 or at[i] == rows:
            return ms[i]
        return ms[i - 1] + (ms[i] - ms[i - 1]) * (rows - at[i - 1]) / (at[i] - at[i - 1])


@dataclass(frozen=True)
class CostTable:
    """Milliseconds of a round's parts.

    verify: one pass of the target over all nodes, and acceptance, by rows. draft: one level of the draft, pass and
    draws, by frontier rows. overhead: what every round costs besides, a one-node round too. drafting: what a round that
    drafts costs besides that and its levels.
    """

    verify: Curve
    draft: Curve
    overhead: float = 0.0
    drafting: float = 0.0

    def __post_init__(self) -> None:
        for name in ("drafting", "overhead"):
            if not 0 <= (given := getattr(self, name)) < float("inf"):
                raise ValueError(f"{name} is {given}, must be finite milliseconds of at least 0")

    def milliseconds(self, rows: int, depth: int, width: int, num_seqs: int = 1) -> float:
        """A round of `num_seqs` sequences whose trees have as many rows each, root included, and `depth` levels.

        The first level draws from the roots alone; each further one has `width` rows per sequence.
        """
        draft = 0.0
        if depth:
            draft = self.drafting + self.draft(num_seqs) + (depth - 1) * self.draft(width * num_seqs)
        return self.verify(rows * num_seqs) + draft + self.overhead

    @staticmethod
    def guessed(share: float) -> CostTable:
        """Before anything is measured: passes that read weights, of which the draft has a `share` of the target's.

        Milliseconds stand for passes of the target over one row.
        """
        draft = max(1e-3, share)
        return CostTable(Curve(((1, 1.0), (8, 1.2), (32, 2.0))), Curve(((1, draft), (8, 1.2 * draft))), 0.02, 0.02)
