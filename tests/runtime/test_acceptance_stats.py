"""Acceptance by depth and rank: it converges, what was not reached does not count, and little evidence moves little."""

import random
from math import sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lychee.runtime.acceptance_stats import (
    DECAY,
    FIRST,
    PRIOR_WEIGHT,
    SHARED_DECAY,
    SHARED_WEIGHT,
    AcceptanceStats,
)
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
        stats.observe(shape, path, len(path), shape.depth)
    return stats


def error(found, expected):
    return max(abs(f - e) for got, want in zip(found, expected, strict=True) for f, e in zip(got, want, strict=True))


def noise(decay):
    """Standard deviation of an average of a rate of 1/2."""
    return sqrt(0.25 * (1 - decay) / (1 + decay))


def add(stats, depth, rank, accepted):
    seen, found = np.zeros((2, stats.max_depth, stats.max_children))
    seen[depth, rank], found[depth, rank] = 1, accepted
    stats._add(seen, found)


class CountsUnreached(AcceptanceStats):
    """The negative control: every drafted node that is not on the path was rejected."""

    def observe(self, shape, path, emitted, levels):
        seen, found = np.zeros((2, self.max_depth, self.max_children))
        for node in range(1, shape.num_nodes):
            place = shape.depths[node] - 1, shape.ranks[node]
            seen[place] += 1
            found[place] += node in path
        self._add(seen, found)


SEEDS = range(3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shapes", [[WIDE], [WIDE] + [TreeShape.chain(3)] * 4], ids=["wide", "mostly chains"])
def test_the_table_converges_to_the_true_one(seed, shapes):
    """Within four standard deviations of the average; which ranks are drawn how often has no influence."""
    rates = true_rates(seed)
    stats = watched(AcceptanceStats(DEPTH, CHILDREN), shapes, rates, 30_000, seed)
    assert error(stats.rates(), rates) < 4 * noise(SHARED_DECAY)
    assert error(stats.table(), [np.minimum.accumulate(chances_of(row)) for row in rates]) < 4 * noise(SHARED_DECAY)


@pytest.mark.parametrize("seed", SEEDS)
def test_counting_unreached_nodes_as_rejected_would_be_biased(seed):
    rates = true_rates(seed)
    stats = watched(CountsUnreached(DEPTH, CHILDREN), [WIDE], rates, 3_000, seed)
    found = stats.rates()
    assert error(found, rates) > 20 * noise(SHARED_DECAY)
    for depth in range(1, DEPTH):
        assert found[depth][0] < rates[depth][0] - 0.3


@pytest.mark.parametrize("seed", SEEDS)
def test_a_request_follows_a_change_of_its_own_acceptance(seed):
    stats = AcceptanceStats(DEPTH, CHILDREN).of_request()
    watched(stats, [WIDE], [[0.9] * CHILDREN] * DEPTH, 200, seed)
    watched(stats, [WIDE], [[0.2] * CHILDREN] * DEPTH, 200, seed)
    assert abs(stats.rates()[0][0] - 0.2) < DECAY**200 + 4 * noise(DECAY)
    assert stats.rates()[0][0] < stats.shared.rates()[0][0] - 0.15  # which remembers longer


def test_what_was_not_reached_leaves_no_trace():
    stats = AcceptanceStats(3, 3)
    before = stats.rates().tolist()
    stats.observe(TreeShape.widths((2, 2, 2)), (0,), 1, 3)  # both children rejected
    after = stats.rates().tolist()
    weight = PRIOR_WEIGHT / (PRIOR_WEIGHT + 1)
    assert after[0] == [FIRST * weight, FIRST / 2 * weight, FIRST / 3]
    assert [after[1], after[2]] == [after[0], after[0]]  # nothing seen: as at the depth above
    stats = AcceptanceStats(1, 3)
    stats.observe(TreeShape.widths((3,)), (0, 1), 2, 1)  # the first is accepted: of the others nothing is known
    assert stats.rates()[0].tolist() == [(FIRST * PRIOR_WEIGHT + 1) / (PRIOR_WEIGHT + 1), *before[0][1:]]


@pytest.mark.parametrize(("emitted", "seen"), [(1, 1), (2, 2), (3, 3), (4, 3)])
def test_tokens_past_the_end_of_the_text_do_not_count(emitted, seen):
    stats = AcceptanceStats(3, 1)
    stats.observe(TreeShape.chain(3), (0, 1, 2, 3), emitted, 3)
    other = AcceptanceStats(3, 1)
    for depth in range(seen):
        add(other, depth, 0, True)
    assert stats.table() == other.table()


def test_nodes_outside_the_table_are_left_out():
    stats, small = AcceptanceStats(3, 3), AcceptanceStats(2, 2)
    for one in (stats, small):
        watched(one, [WIDE], true_rates(0), 50, 0)
    assert small.rates() == pytest.approx(stats.rates()[:2, :2])


def test_a_new_request_starts_from_what_all_have_shown_and_leaves_what_it_shows():
    shared = AcceptanceStats(DEPTH, CHILDREN)
    watched(shared.of_request(), [WIDE], true_rates(1), 5000, 1)
    new = shared.of_request()
    assert new.rates() == pytest.approx(shared.rates())
    before = new.rates()
    new.observe(WIDE, (0,), 1, WIDE.depth)
    assert new.rates()[0][0] < before[0][0] * SHARED_WEIGHT / (SHARED_WEIGHT + 1)
    assert shared.rates()[0][0] < before[0][0]


def test_a_request_that_is_hard_to_draft_for_is_hard_at_depths_that_it_has_not_reached():
    draws, shared = random.Random(0), AcceptanceStats(8, 1)
    chain = TreeShape.chain(8)
    for i in range(400):  # easy and hard requests, of which only the easy ones are drafted deep
        request, rate = shared.of_request(), 0.95 if i % 2 else 0.5
        watched(request, [chain if i % 2 else chain.cut(2, 9)], [[rate]] * 8, 20, draws.random())
        request.settle()
    hard = watched(shared.of_request(), [chain.cut(2, 9)], [[0.5]] * 8, 20, 1)
    easy = watched(shared.of_request(), [chain.cut(2, 9)], [[0.95]] * 8, 20, 2)
    assert easy.rates()[7][0] > 0.88 > 0.78 > hard.rates()[7][0]
    assert hard.hazard > 1.3 > 0.7 > easy.hazard
    assert shared.rates()[7][0] < 0.92  # an average that did not know who was drafted deep would say 0.95


def test_rounds_counted_together_are_averaged_as_one_by_one():
    rates, together, single = true_rates(3), AcceptanceStats(DEPTH, CHILDREN), AcceptanceStats(DEPTH, CHILDREN)
    watched(together, [WIDE], rates, 200, 0)
    draws = random.Random(0)
    for _ in range(200):
        path = round_of(draws.choice([WIDE]), rates, draws)
        single.observe(WIDE, path, len(path), WIDE.depth)
        single.settle()
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
    stats = AcceptanceStats(3, 3).of_request()
    for depth, rank, accepted in observations:
        add(stats, depth, rank, accepted)
    table = stats.table()
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
    assert len(set(stats.table()[0][1:])) == 1


def test_a_request_that_is_not_drafted_for_becomes_one_like_all_others():
    shared = AcceptanceStats(DEPTH, CHILDREN)
    watched(shared.of_request(), [WIDE], [[0.8] * CHILDREN] * DEPTH, 2000, 0)
    hard = watched(shared.of_request(), [WIDE], [[0.1] * CHILDREN] * DEPTH, 60, 1)
    assert hard.hazard > 1.5
    for _ in range(5000):
        hard.fade()
    assert hard.hazard == pytest.approx(1, abs=0.01)
    assert hard.rates() == pytest.approx(shared.rates(), abs=0.01)
