"""The controller lengthens what is accepted, shortens what is not, and stops when nothing is."""

import random

from lychee.runtime.config import SpeculativeConfig
from lychee.runtime.controller import FIRST_PAUSE, LAST_PAUSE, Fixed, Window, make_controller
from lychee.runtime.tree import ProposedTree, TreeShape


def play(controller, acceptance, rounds, seed=0):
    """Lengths planned over rounds in which a draft token is accepted with a probability, a function of the round."""
    draws, lengths = random.Random(seed), []
    for i in range(rounds):
        (shape,) = controller.plan([7])
        length = shape.num_nodes - 1
        accepted = 0
        while accepted < length and draws.random() < acceptance(i):
            accepted += 1
        controller.observe(7, ProposedTree(shape, ()), range(accepted + 1), accepted + 1)
        lengths.append(length)
    return lengths


def test_a_fixed_length_is_kept():
    controller = make_controller(SpeculativeConfig(num_speculative_tokens=5))
    assert controller == Fixed(TreeShape.chain(5))
    assert play(controller, lambda _: 0.1, 20) == [5] * 20


def test_a_draft_that_is_always_right_reaches_the_longest_draft():
    assert play(Window(16, 0.4), lambda _: 1.0, 40)[-1] == 16


def test_buckets_end_at_the_configured_maximum():
    assert Window(10, 0.4).buckets == [4, 8, 10]
    assert Window(2, 0.4).buckets == [2]
    assert Window(32, 0.4).buckets == [4, 8, 12, 16, 24, 32]


def test_a_draft_that_is_always_wrong_ends_in_native_rounds_with_rare_probes():
    lengths = play(Window(16, 0.4), lambda _: 0.0, 600)
    probes = [i for i, length in enumerate(lengths[-300:]) if length]
    assert len(probes) <= 300 // LAST_PAUSE + 1
    assert max(lengths[4:]) == 4


def test_acceptance_that_recovers_is_noticed_after_native_rounds():
    lengths = play(Window(16, 0.4), lambda i: 0.0 if i < 30 else 1.0, 160)
    assert lengths[-1] == 16


def test_low_acceptance_shortens_the_draft():
    lengths = play(Window(16, 0.4), lambda i: 1.0 if i < 40 else 0.45, 120)
    assert lengths[39] == 16
    assert 0 < sorted(lengths[60:])[30] <= 4


def test_a_first_full_rejection_does_not_pause():
    controller = Window(16, 0.4)
    assert play(controller, lambda _: 0.0, 1) == [4]
    assert controller.plan([7])[0].num_nodes == 5
    assert FIRST_PAUSE < LAST_PAUSE


def test_requests_do_not_share_history():
    controller = Window(16, 0.4)
    play(controller, lambda _: 1.0, 40)
    assert [s.num_nodes for s in controller.plan([7, 8])] == [17, 5]
    controller.forget(7)
    assert controller.plan([7])[0].num_nodes == 5
