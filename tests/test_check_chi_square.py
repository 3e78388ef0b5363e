"""The statistics of `lychee check` against scipy, and their false alarms against what they promise."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from lychee.check.chi_square import IMPOSSIBLE, LEAST_EXPECTED, ChiSquare, Counts, Drift, pearson


@pytest.mark.parametrize("freedom", [1, 2, 5, 40, 500])
@pytest.mark.parametrize("times", [0.1, 0.9, 1.0, 1.3, 3.0, 20.0])
def test_p_values_are_scipys(freedom, times):
    statistic = times * freedom
    expected = stats.chi2.sf(statistic, freedom)
    assert ChiSquare(statistic, freedom).p_value == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_no_freedom_is_no_evidence_and_the_impossible_is_certain():
    assert ChiSquare().p_value == 1.0
    assert IMPOSSIBLE.p_value == 0.0
    assert (ChiSquare(3.0, 40) + IMPOSSIBLE).p_value == 0.0
    assert ChiSquare(3.0, 2) + ChiSquare(4.0, 1) == ChiSquare(7.0, 3)


def test_pearson_is_scipys_where_no_cell_is_rare():
    probs = torch.tensor([0.5, 0.2, 0.3])
    found = pearson(torch.tensor([45, 30, 25]), probs)
    assert found.statistic == pytest.approx(stats.chisquare([45, 30, 25], [50, 20, 30]).statistic)
    assert found.freedom == 2


def test_rare_tokens_share_a_cell_or_join_the_rarest_that_is_not():
    probs, seen = torch.tensor([0.5, 0.38, 0.05, 0.04, 0.03], dtype=torch.float64), torch.tensor([52, 36, 6, 3, 3])
    assert pearson(seen, probs).statistic == pytest.approx(stats.chisquare([52, 36, 12], [50, 38, 12]).statistic)
    probs, seen = torch.tensor([0.6, 0.37, 0.03], dtype=torch.float64), torch.tensor([61, 34, 5])
    assert pearson(seen, probs).statistic == pytest.approx(stats.chisquare([61, 39], [60, 40]).statistic)
    certain = pearson(torch.tensor([0, 100]), torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert (certain.statistic, certain.freedom) == (0.0, 0)


def of_law(seen, law):
    return Counts.of(torch.arange(len(seen)).repeat_interleave(seen), law.expand(int(seen.sum()), -1))


def test_counts_from_one_law_are_pearsons():
    law, seen = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64), torch.tensor([240, 480, 280])
    found = of_law(seen, law).test()
    assert found.freedom == 2
    assert found.statistic == pytest.approx(pearson(seen, law).statistic)


def test_counts_that_cannot_vary_are_no_evidence():
    assert Counts.none(6).test() == ChiSquare()
    assert of_law(torch.tensor([0, 500]), torch.tensor([0.0, 1.0], dtype=torch.float64)).test() == ChiSquare()
    law = torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64)
    assert of_law(torch.tensor([0, 260, 240]), law).test().freedom == 1


def simulated(rng, bias=0.0, num_laws=40, draws=12, num_cells=6):
    """Counts of draws from many laws, as samples of many histories give them. bias: mass moved to the last cell."""
    laws = rng.dirichlet(np.full(num_cells, 0.7), num_laws).repeat(draws, 0)
    drawn = (1 - bias) * laws + bias * np.eye(num_cells)[-1]
    cells = (rng.random((len(drawn), 1)) > drawn.cumsum(1)[:, :-1]).sum(1)
    return Counts.of(torch.from_numpy(cells), torch.from_numpy(laws))


def test_counts_of_many_laws_give_uniform_p_values_and_see_a_bias():
    rng = np.random.default_rng(0)
    p_values = [simulated(rng).test().p_value for _ in range(400)]
    assert stats.kstest(p_values, "uniform").pvalue > 0.01
    assert all(simulated(rng, bias=0.15).test().p_value < 1e-3 for _ in range(10))


def test_pearson_gives_uniform_p_values_where_tokens_are_many_and_mostly_rare():
    rng = np.random.default_rng(1)
    probs = rng.dirichlet(np.full(200, 0.1))
    p_values = [
        pearson(torch.from_numpy(rng.multinomial(600, probs)), torch.from_numpy(probs)).p_value for _ in range(400)
    ]
    assert (probs * 600 >= LEAST_EXPECTED).sum() > 5
    assert stats.kstest(p_values, "uniform").pvalue > 0.01
    assert math.isfinite(min(p_values))


def drifting(rng, persistence=0.0):
    """Terms of 60 samples of 40 tokens, each weighted by the sum of those before it; what they do may persist."""
    favours = rng.random(60)[:, None] if persistence else 0.5
    chances = rng.uniform(0.2, 0.8, (60, 40))
    hits = rng.random((60, 40)) < (1 - persistence) * chances + persistence * favours
    excess = hits - chances
    before = np.cumsum(excess, 1) - excess
    terms, variances = before * excess, before**2 * chances * (1 - chances)
    return Drift.of(torch.from_numpy(terms), torch.from_numpy(variances))


def test_a_drift_gives_uniform_p_values_and_sees_what_persists():
    rng = np.random.default_rng(2)
    p_values = [drifting(rng).test().p_value for _ in range(400)]
    assert stats.kstest(p_values, "uniform").pvalue > 0.01
    assert all((drifting(rng, 0.5) + drifting(rng, 0.5)).test().p_value < 1e-3 for _ in range(10))


def test_a_drift_of_nothing_or_of_one_large_term_is_no_evidence():
    empty = torch.zeros(0, dtype=torch.float64)
    assert Drift.of(empty, empty).test() == ChiSquare()
    assert Drift(3.0, 5.0, 1.0).test() == ChiSquare()
    assert Drift(3.0, 10.0, 1.0).test() == ChiSquare(0.9, 1)
