"""Acceptance by depth and rank: it converges, what was not reached does not count, and little evidence moves little."""

import random
from math import sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lychee.runtime.acceptance_stats import DECAY, FIRST, PRIOR_WEIGHT, AcceptanceStats, falling, observed
from lychee.runtime.cost_table import CostTable, Curve
from lychee.runtime.planner import plan
from lychee.runtime.shape_buckets import shape_buckets
from lychee.runtime.tree import TreeShape

DEPTH, CHILDREN = 3, 3
WIDE = TreeShape.widths((3, 3, 3))


def true_rates(seed):
    draws = random.Random(seed)
    return [[draws.uniform(0.5, 0.9)] + [draws.uniform(0.1, 0.5) for _ in range(CHILDREN - 1)] for _ in range(DEPTH)]


def chances_of(rates):
    """Of each rank, that it is accepted and all before it are rejected."""
    found, left = [], 1.0
    for rate in rates:
        found.append(left * rate)
        left *= 1 - rate
    return found


def round_of(shape, rates, draws):
    """The accepted path, where a child is accepted at its rate once its earlier siblings are rejected."""
    path = [0]
    while True:
        children = [node for node, parent in enumerate(shape.parents) if parent == path[-1]]
        for rank, child in enumerate(children):
            if draws.random() < rates[len(path) - 1][rank]:
                path.append(child)
                break
        else:
            return path


def watched(stats, shapes, rates, rounds, seed):
    draws = random.Random(seed)
    for _ in range(rounds):
        shape = draws.choice(shapes)
        path = round_of(shape, rates, draws)
        seen(stats, shape, path, len(path), shape.depth)
    return stats


def seen(stats, shape, path, emitted, levels):
    """One round's outcome."""
    stats.add(*observed(shape, path[-1], min(emitted, levels), stats.max_depth, stats.max_children))


def error(found, expected):
    return max(abs(f - e) for got, want in zip(found, expected, strict=True) for f, e in zip(got, want, strict=True))


NOISE = sqrt(0.25 * (1 - DECAY) / (1 + DECAY))  # standard deviation of an average of a rate of 1/2


def add(stats, depth, rank, accepted):
    seen, found = np.zeros((2, stats.max_depth, stats.max_children))
    seen[depth, rank], found[depth, rank] = 1, accepted
    stats.add(seen, found)


def count_unreached(stats, rates, rounds, seed):
    """The negative control: every drafted node that is not on the path was rejected."""
    draws = random.Random(seed)
    for _ in range(rounds):
        path = round_of(WIDE, rates, draws)
        tested, found = np.zeros((2, stats.max_depth, stats.max_children))
        for node in range(1, WIDE.num_nodes):
            place = WIDE.depths[node] - 1, WIDE.ranks[node]
            tested[place] += 1
            found[place] += node in path
        stats.add(tested, found)


SEEDS = range(3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shapes", [[WIDE], [WIDE] + [TreeShape.chain(3)] * 4], ids=["wide", "mostly chains"])
def test_the_table_converges_to_the_true_one(seed, shapes):
    """Within four standard deviations of the average; which ranks are drawn how often has no influence."""
    rates = true_rates(seed)
    stats = watched(AcceptanceStats(DEPTH, CHILDREN), shapes, rates, 30_000, seed)
    assert error(stats.rates(), rates) < 4 * NOISE
    assert error(falling(stats.rates()), [np.minimum.accumulate(chances_of(row)) for row in rates]) < 4 * NOISE


@pytest.mark.parametrize("seed", SEEDS)
def test_counting_unreached_nodes_as_rejected_would_be_biased(seed):
    rates = true_rates(seed)
    stats = AcceptanceStats(DEPTH, CHILDREN)
    count_unreached(stats, rates, 3_000, seed)
    found = stats.rates()
    assert error(found, rates) > 20 * NOISE
    for depth in range(1, DEPTH):
        assert found[depth][0] < rates[depth][0] - 0.3


def test_what_was_not_reached_leaves_no_trace():
    stats = AcceptanceStats(3, 3)
    before = stats.rates().tolist()
    seen(stats, TreeShape.widths((2, 2, 2)), (0,), 1, 3)  # both children rejected
    after = stats.rates().tolist()
    weight = PRIOR_WEIGHT / (PRIOR_WEIGHT + 1)
    assert after[0] == [FIRST * weight, FIRST / 2 * weight, FIRST / 3]
    assert [after[1], after[2]] == [after[0], after[0]]  # nothing seen: as at the depth above
    stats = AcceptanceStats(1, 3)
    seen(stats, TreeShape.widths((3,)), (0, 1), 2, 1)  # the first is accepted: of the others nothing is known
    assert stats.rates()[0].tolist() == [(FIRST * PRIOR_WEIGHT + 1) / (PRIOR_WEIGHT + 1), *before[0][1:]]


@pytest.mark.parametrize(("emitted", "counted"), [(1, 1), (2, 2), (3, 3), (4, 3)])
def test_tokens_past_the_end_of_the_text_do_not_count(emitted, counted):
    stats, other = AcceptanceStats(3, 1), AcceptanceStats(3, 1)
    seen(stats, TreeShape.chain(3), (0, 1, 2, 3), emitted, 3)
    for depth in range(counted):
        add(other, depth, 0, True)
    assert np.array_equal(stats.rates(), other.rates())


def test_nodes_outside_the_table_are_left_out():
    stats, small = AcceptanceStats(3, 3), AcceptanceStats(2, 2)
    for one in (stats, small):
        watched(one, [WIDE], true_rates(0), 50, 0)
    assert small.rates() == pytest.approx(stats.rates()[:2, :2])


def test_rounds_counted_together_are_averaged_as_one_by_one():
    rates, together, draws = true_rates(3), AcceptanceStats(DEPTH, CHILDREN), random.Random(0)
    single = watched(AcceptanceStats(DEPTH, CHILDREN), [WIDE], rates, 200, 0)
    for _ in range(20):
        paths = [round_of(draws.choice([WIDE]), rates, draws) for _ in range(10)]
        together.add(*sum(observed(WIDE, path[-1], DEPTH, DEPTH, CHILDREN) for path in paths))
    assert together.rates() == pytest.approx(single.rates(), abs=0.03)


def test_without_evidence_the_chance_that_all_are_rejected_falls_as_a_power_of_their_number():
    rejected = 1.0
    ratios = []
    for rate in AcceptanceStats(1, 64).rates()[0]:
        rejected *= 1 - rate
        ratios.append(rejected)
    assert ratios[63] / ratios[31] == pytest.approx(2**-FIRST, rel=0.02)
    assert ratios[31] / ratios[15] == pytest.approx(2**-FIRST, rel=0.02)


OBSERVATIONS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans()), max_size=60)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(OBSERVATIONS)
def test_every_table_is_one_that_the_planner_takes(observations):
    stats = AcceptanceStats(3, 3)
    for depth, rank, accepted in observations:
        add(stats, depth, rank, accepted)
    table = tuple(map(tuple, falling(stats.rates()).tolist()))
    assert all(row[-1] > 0 and sum(row) <= 1 + 1e-12 for row in table)
    costs = CostTable(Curve(((1, 1.0), (8, 1.1))), Curve(((1, 0.01),)))
    assert plan(table, costs, shape_buckets(12, 3)).emitted >= 1


def test_a_later_rank_is_never_worth_more_than_an_earlier_one():
    stats = AcceptanceStats(1, 3)
    for _ in range(2000):
        add(stats, 0, 0, False)
        add(stats, 0, 1, False)
        add(stats, 0, 2, True)
    assert stats.rates()[0, 2] > 0.9
    assert len(set(falling(stats.rates())[0, 1:].tolist())) == 1
