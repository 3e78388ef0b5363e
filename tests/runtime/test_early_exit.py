"""Early exit stops drafting where what is left would not pay, by a calibrated confidence, and changes no text."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lychee.runtime.config import SpeculativeConfig
from lychee.runtime.controller import Fixed
from lychee.runtime.cost_table import CostTable, Curve
from lychee.runtime.early_exit import Calibration, Questions, least_survivals
from lychee.runtime.planned import COST_ROUNDS, Planned
from lychee.runtime.planner import planned
from lychee.runtime.tree import ProposedTree, TreeShape

from .pairs import PROMPT, PROMPTS, greedy, make_llm, seeded

FLAT = CostTable(Curve(((1, 10.0), (64, 10.0))), Curve(((1, 1.0), (64, 1.0))))


def chain_table(rate, depth=32):
    return ((rate,),) * depth


def test_a_calibration_learns_what_a_confidence_is_worth():
    draws, calibration = random.Random(0), Calibration()
    assert calibration.rate(0.3) == pytest.approx(0.3)
    for _ in range(4000):
        confidence = draws.random()
        calibration.observe(confidence, draws.random() < confidence**2)
    for confidence in (0.16, 0.47, 0.97):
        assert calibration.rate(confidence) == pytest.approx(confidence**2, abs=0.08)
    assert calibration.survival([0.97, 0.47]) == calibration.rate(0.97) * calibration.rate(0.47)


@settings(deadline=None)
@given(st.floats(0.05, 0.95), st.floats(0.05, 3.0), st.integers(1, 12))
def test_on_a_chain_the_next_token_must_bring_as_much_per_millisecond_as_the_plan(accept, level_ms, length):
    """With flat verification the best of all continuations is the one that is checked by hand here."""
    costs = CostTable(Curve(((1, 10.0), (64, 10.0))), Curve(((1, level_ms),)))
    shape = TreeShape.chain(length)
    rate = planned(shape, chain_table(accept), costs).rate
    for depth, least in enumerate(least_survivals(shape, rate, chain_table(accept), costs, 1, Questions.of(costs))):
        paid = [
            rate * more * level_ms / sum(accept**nth for nth in range(1, more + 1))
            for more in range(1, length - depth + 1)
        ]
        assert least == pytest.approx(min(paid))


def test_side_branches_that_pay_for_themselves_are_drafted_however_sure_the_trunk_is():
    shape = TreeShape.widths((2, 2))
    costs = CostTable(Curve(((1, 10.0), (64, 10.0))), Curve(((1, 0.01),)))
    table = ((0.5, 0.4), (0.5, 0.4))
    assert least_survivals(shape, planned(shape, table, costs).rate, table, costs, 1, Questions.of(costs))[1] == 0.0


def test_where_nothing_below_is_ever_accepted_no_trunk_is_sure_enough():
    table = ((0.9,), (0.0,))
    assert least_survivals(TreeShape.chain(2), 0.1, table, FLAT, 1, Questions.of(FLAT))[1] == math.inf


def test_where_a_question_costs_many_levels_fewer_are_asked():
    dear = CostTable(FLAT.verify, FLAT.draft, drafting=2.0)
    cheap = CostTable(FLAT.verify, FLAT.draft, drafting=0.1)
    assert Questions.of(dear).levels == 20 * Questions.of(cheap).levels


def test_a_sure_draft_is_followed_further_than_an_unsure_one():
    controller = Planned(FLAT, 16, 32)
    depths = {}
    for request, confidence in ((1, 0.98), (2, 0.3)):
        (shape,) = controller.plan([request])
        depth = 1
        while depth < shape.depth and controller(request, depth, [confidence] * depth):
            depth += 1
        depths[request] = depth
    assert depths[1] > depths[2]


def test_what_was_not_drafted_is_not_taken_for_rejected():
    controller = Planned(FLAT, 8, 16)
    (shape,) = controller.plan([1])
    for _ in range(200):
        controller.observe(1, ProposedTree(shape, (), 1), (0, 1), 2)
    controller.forget(1)
    seen = controller.difficulty.stats._seen
    assert seen[0][0] > 0
    assert all(not any(ranks) for ranks in seen[1:])


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_a_confidence_is_judged_by_whether_the_trunk_was_accepted_there(accepted):
    controller = Planned(FLAT, 8, 16)
    (shape,) = controller.plan([1])
    for _ in range(100):
        controller(1, 2, [0.55, 0.95])
        controller.observe(1, ProposedTree(shape, (), 2), tuple(range(accepted + 1)), accepted + 1)
    rates = controller.calibration.rate(0.55), controller.calibration.rate(0.95)
    assert (rates[0] > 0.9) == (accepted > 0)
    assert (rates[1] < 0.1) == (accepted == 1)  # what was not reached is not judged


def test_costs_follow_the_rounds_that_the_controller_is_told_of():
    controller = Planned(FLAT, 8, 16)
    tree = (ProposedTree(TreeShape.chain(3), (1, 2, 3, 4), 3),)
    for _ in range(COST_ROUNDS):
        controller.timed(tree, 3.0, 50.0, 0.0)
    assert controller.costs.verify(4) == pytest.approx(50.0)
    controller.costs = FLAT
    assert controller.costs == FLAT


def test_rounds_in_which_questions_are_asked_do_not_make_the_next_ones_cheaper():
    """A level that is asked after each costs more: it then looks as if drafting cost nothing but its levels."""
    controller = Planned(CostTable(FLAT.verify, FLAT.draft, drafting=2.0), 8, 16)
    before = controller.questions
    for number in range(COST_ROUNDS):
        length = 1 + number % 4
        controller.timed((ProposedTree(TreeShape.chain(length), (1,) * (length + 1), length),), 3.0 * length, 10.0, 0.0)
    assert controller.costs.drafting < 1.0
    assert (controller.questions, controller.levels) == (before, before.levels)


def test_a_draft_that_is_always_right_stays_so_wherever_drafting_stops():
    """The last node that was drafted lacks draft KV, though its shape has children there: native rounds may follow."""
    llm = make_llm("same", config=SpeculativeConfig(tree="auto"), max_num_seqs=4)
    stops = itertools.cycle([1, 3, 2])

    class Stops:
        levels = 1

        def __call__(self, seq_id, depth, confidences):
            return depth < self.depth if depth > 1 else depth < self.renewed()

        def renewed(self):
            self.depth = next(stops)
            return self.depth

    class WithNativeRounds(Fixed):
        lengths = itertools.cycle([5, 0, 0, 5, 5])

        def plan(self, request_ids):
            return [TreeShape.chain(next(self.lengths))] * len(request_ids)

    llm.engine().controller = WithNativeRounds(TreeShape.chain(5), Stops())
    llm.generate(PROMPT, greedy(max_tokens=60))
    metrics = llm.metrics()
    assert metrics.trunk_accepted == metrics.trunk_drafted > 20
    assert metrics.rounds > 15


@pytest.mark.parametrize("params", [greedy(max_tokens=40), seeded(max_tokens=40)], ids=["greedy", "seeded"])
@pytest.mark.parametrize("threshold", [0.3, 0.9])
def test_text_does_not_depend_on_where_drafting_stops(params, threshold):
    llm = make_llm("near", config=SpeculativeConfig(tree="auto"), max_num_seqs=4)
    controller, depths = llm.engine().controller, []
    controller.costs = CostTable(Curve(((1, 1.0), (64, 1.2))), Curve(((1, 0.05), (64, 0.06))))
    ask, observe = type(controller).__call__, controller.observe

    class Stops(Planned):
        levels = 1

        def __call__(self, seq_id, depth, confidences):
            ask(self, seq_id, depth, confidences)
            return confidences[-1] > threshold

    def seen(request_id, tree, path, emitted):
        depths.append((tree.depth, tree.shape.depth))
        observe(request_id, tree, path, emitted)

    controller.__class__, controller.observe = Stops, seen
    native = llm.generate(PROMPTS, params, native=True)
    for got, want in zip(llm.generate(PROMPTS, params), native, strict=True):
        assert got.outputs[0].token_ids == want.outputs[0].token_ids
    assert any(0 < depth < planned for depth, planned in depths)
    stats = llm.metrics()
    assert stats.drafted >= stats.trunk_drafted >= stats.trunk_accepted > 0
    assert stats.trunk_drafted <= sum(depth for depth, _ in depths)
