"""How hard a text is to draft for: a change is noticed, what was not seen fades, and all requests' rates are of all."""

import random

import numpy as np
import pytest

from lychee.runtime.difficulty import HAZARDS, PRIOR, Difficulty
from lychee.runtime.tree import TreeShape

CHAIN = TreeShape.chain(6)


def accepted(shape, rates, draws):
    """Nodes of the trunk's accepted path."""
    return next((depth for depth in range(shape.depth) if draws.random() >= rates[depth]), shape.depth)


def watched(difficulty, belief, shape, rate, rounds, seed):
    draws = random.Random(seed)
    for _ in range(rounds):
        belief = difficulty.later(belief, [(shape, accepted(shape, [rate] * shape.depth, draws), shape.depth)], 1)
    return belief


def first(difficulty, belief):
    """Acceptance at the root's first child."""
    return difficulty.table(belief)[0][0]


def test_a_belief_is_a_distribution_and_finds_the_rate():
    for rate in (0.2, 0.5, 0.8, 0.95):
        difficulty = Difficulty(6, 2)
        belief = watched(difficulty, PRIOR, CHAIN, rate, 300, 1)
        assert belief.sum() == pytest.approx(1)
        assert belief.min() > 0
        assert first(difficulty, belief) == pytest.approx(rate, abs=0.1)


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.3), (0.3, 0.9)])
def test_a_change_of_the_text_is_noticed_within_a_few_rounds(before, after):
    difficulty = Difficulty(6, 2)
    belief = watched(difficulty, PRIOR, CHAIN, before, 400, 2)
    assert first(difficulty, belief) == pytest.approx(before, abs=0.2)
    belief = watched(difficulty, belief, CHAIN, after, 8, 3)
    assert first(difficulty, belief) == pytest.approx(after, abs=0.2)


def test_requests_begin_alike_and_differ_by_what_was_accepted_of_each():
    difficulty = Difficulty(6, 2)
    easy, hard = watched(difficulty, PRIOR, CHAIN, 0.9, 40, 4), watched(difficulty, PRIOR, CHAIN, 0.4, 40, 5)
    assert first(difficulty, easy) > 0.8 > 0.55 > first(difficulty, hard)


def test_of_text_that_was_accepted_so_deep_the_next_token_is_likelier_to_be():
    rates = [chances[0] for chances in Difficulty(6, 2).table(PRIOR)]
    assert rates == sorted(rates)
    assert rates[-1] > rates[0] + 0.05


def test_a_request_that_is_not_drafted_for_becomes_one_like_all_others():
    difficulty = Difficulty(6, 2)
    belief = hard = watched(difficulty, PRIOR, CHAIN, 0.1, 60, 1)
    belief = difficulty.later(belief, [], 400)
    assert belief == pytest.approx(difficulty.prior, abs=0.01)
    assert abs(hard - difficulty.prior).max() > 0.1


def test_what_new_text_is_expected_to_be_follows_what_text_was():
    """Text that is all alike leaves little to chance; easy and hard text by turns leaves much."""

    def spread(prior):
        mean = prior @ np.log2(HAZARDS)
        return float(np.sqrt(prior @ (np.log2(HAZARDS) - mean) ** 2))

    alike, differs = Difficulty(6, 2), Difficulty(6, 2)
    belief = other = PRIOR
    for turn in range(30):
        belief = watched(alike, belief, CHAIN, 0.6, 40, turn)
        other = watched(differs, other, CHAIN, 0.9 if turn % 2 else 0.2, 40, turn)
    assert spread(alike.prior) < 0.7 * spread(PRIOR) < spread(differs.prior)


def test_deep_rates_are_of_all_requests_though_only_easy_ones_are_drafted_deep():
    draws, difficulty = random.Random(0), Difficulty(8, 1)
    deep, shallow = TreeShape.chain(8), TreeShape.chain(2)
    for i in range(400):
        shape, rate = (deep, 0.95) if i % 2 else (shallow, 0.5)
        watched(difficulty, PRIOR, shape, rate, 20, draws.random())
    reach = {rate: [] for rate in (0.5, 0.95)}
    for rate, found in reach.items():
        for seed in range(20):
            belief = watched(difficulty, PRIOR, shallow, rate, 20, seed)
            found.append(np.prod(difficulty.table(belief), 0)[0])
    hard, easy = map(np.mean, reach.values())
    assert hard < 0.12 < 0.5 < easy  # 0.004 and 0.66
    assert difficulty.stats.rates()[7, 0] < 0.92  # an average that did not know who was drafted deep would say 0.95


def test_what_is_expected_of_chains_is_what_they_emit_where_easy_and_hard_text_come_by_turns():
    draws, difficulty, belief = random.Random(0), Difficulty(6, 1), PRIOR
    expected = emitted = 0.0
    for i in range(4000):
        rate = 0.9 if i // 25 % 2 else 0.4
        reach = np.cumprod([chances[0] for chances in difficulty.table(belief)])
        last = accepted(CHAIN, [rate] * 6, draws)
        belief = difficulty.later(belief, [(CHAIN, last, 6)], 1)
        if i > 500:
            expected, emitted = expected + 1 + reach.sum(), emitted + 1 + last
    assert expected == pytest.approx(emitted, rel=0.03)


def test_hazards_hold_a_draft_that_is_nearly_always_right_and_one_that_never_is():
    difficulty = Difficulty(6, 2)
    right, wrong = (watched(difficulty, PRIOR, CHAIN, rate, 60, 0) for rate in (1.0, 0.0))
    assert first(difficulty, right) > 0.95
    assert first(difficulty, wrong) < 0.05
    assert min(HAZARDS) < 1 < max(HAZARDS)
