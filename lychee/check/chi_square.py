"""Chi-square tests of counts whose law is known exactly."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

LEAST_EXPECTED = 10.0
"""Cells expected less often are pooled: below five to ten the statistic's tail is no longer chi-square's."""
NULL = 1e-9  # eigenvalues so small beside the largest are of directions in which the counts cannot vary


@dataclass(frozen=True)
class ChiSquare:
    """A statistic and its degrees of freedom; independent ones add. Infinite where the impossible was seen."""

    statistic: float = 0.0
    freedom: int = 0

    def __add__(self, other: ChiSquare) -> ChiSquare:
        return ChiSquare(self.statistic + other.statistic, self.freedom + other.freedom)

    def of_more(self, times: float) -> ChiSquare:
        """About what so many times the draws would give, what is more than chance growing with them."""
        return ChiSquare(self.freedom + times * max(0.0, self.statistic - self.freedom), self.freedom)

    @property
    def p_value(self) -> float:
        """Probability of a statistic as large under the law: Q(freedom / 2, statistic / 2), the incomplete gamma."""
        if self.statistic == inf:
            return 0.0
        if self.freedom == 0:
            return 1.0
        half = torch.tensor([self.freedom, self.statistic], dtype=torch.float64) / 2
        return float(torch.special.gammaincc(half[0], half[1]))


IMPOSSIBLE = ChiSquare(inf, 1)


def pearson(seen: Tensor, probs: Tensor) -> ChiSquare:
    """Of how often each token was drawn, [vocab], in draws from one law, [vocab]."""
    expected = probs.double() * seen.sum()
    frequent = expected >= LEAST_EXPECTED
    cells = torch.stack([expected, seen.double()])
    rare = cells[:, ~frequent].sum(1, keepdim=True)
    cells = cells[:, frequent]
    if rare[0] >= LEAST_EXPECTED or not cells.shape[1]:
        cells = torch.cat([cells, rare], 1)
    else:
        cells[:, cells[0].argmin()] += rare[:, 0]
    expected, observed = cells
    return ChiSquare(float(((observed - expected) ** 2 / expected).sum()), cells.shape[1] - 1)


@dataclass(frozen=True)
class Counts:
    """How often each of some ordered cells was drawn, in draws that each had a law of its own.

    seen, expected: [num_cells] float64; covariance: [num_cells, num_cells], what it is under those laws.
    """

    seen: Tensor
    expected: Tensor
    covariance: Tensor

    @staticmethod
    def none(num_cells: int) -> Counts:
        zeros = torch.zeros(num_cells, dtype=torch.float64)
        return Counts(zeros, zeros, zeros.diag())

    @staticmethod
    def of(drawn: Tensor, laws: Tensor) -> Counts:
        """Of the cells drawn, [num_draws], each from a law of its own, [num_draws, num_cells] float64."""
        expected = laws.sum(0)
        seen = drawn.bincount(minlength=len(expected)).double()
        return Counts(seen, expected, expected.diag() - laws.T @ laws)

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.seen + other.seen, self.expected + other.expected, self.covariance + other.covariance)

    def test(self) -> ChiSquare:
        """The distance of `seen` from `expected` in units of the covariance: chi-square's, the draws being many."""
        counts = self
        while counts.seen.numel() > 1 and float(counts.covariance.diag().min()) < LEAST_EXPECTED:
            counts = counts._merged(int(counts.covariance.diag().argmin()))
        if counts.seen.numel() == 1:
            return ChiSquare()
        values, vectors = torch.linalg.eigh(counts.covariance)
        varies = values > NULL * values.max()
        along = vectors.T @ (counts.seen - counts.expected)
        return ChiSquare(float((along[varies] ** 2 / values[varies]).sum()), int(varies.sum()))

    def _merged(self, cell: int) -> Counts:
        """The cell and a neighbour are one: the next, or the last cell's the one before."""
        num_cells = self.seen.numel()
        cell = min(cell, num_cells - 2)
        sums = torch.eye(num_cells, dtype=torch.float64)
        sums = torch.cat([sums[:cell], sums[cell : cell + 2].sum(0, keepdim=True), sums[cell + 2 :]])
        return Counts(sums @ self.seen, sums @ self.expected, sums @ self.covariance @ sums.T)


@dataclass(frozen=True)
class Drift:
    """A sum of terms whose mean is zero, whatever the terms before were. variance: the sum of theirs."""

    total: float = 0.0
    variance: float = 0.0
    largest: float = 0.0  # term, less its sign

    @staticmethod
    def of(terms: Tensor, variances: Tensor) -> Drift:
        """Of terms and what each varied by when those before it were known; both of any one shape, float64."""
        if not terms.numel():
            return Drift()
        return Drift(float(terms.sum()), float(variances.sum()), float(terms.abs().max()))

    def __add__(self, other: Drift) -> Drift:
        largest = max(self.largest, other.largest)
        return Drift(self.total + other.total, self.variance + other.variance, largest)

    def test(self) -> ChiSquare:
        """Normal, no term being large beside the whole; no evidence while one is."""
        if self.variance == 0 or self.variance < LEAST_EXPECTED * self.largest**2:
            return ChiSquare()
        return ChiSquare(self.total**2 / self.variance, 1)
