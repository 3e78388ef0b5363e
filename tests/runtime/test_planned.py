"""The controller that plans trees drafts what is accepted, leaves what is not, and finds a draft that recovers."""

import random

import pytest

from lychee.runtime.cost_table import CostTable, Curve
from lychee.runtime.difficulty import PRIOR
from lychee.runtime.planned import WORTH, Planned
from lychee.runtime.tree import ProposedTree, TreeShape

MEMORY_BOUND = CostTable(Curve(((1, 10.0), (64, 11.0))), Curve(((1, 0.5), (64, 0.6))))
ROWS_COST = CostTable(Curve(((1, 1.0), (64, 64.0))), Curve(((1, 0.05), (64, 0.5))))


def play(controller, rates, rounds, seed=0, request=7):
    """Shapes planned over rounds: a child of rank r is accepted at rates(i)[r], if none before it is."""
    draws, shapes = random.Random(seed), []
    for i in range(rounds):
        (shape,) = controller.plan([request])
        path, node = [0], 0
        while True:
            children = [n for n, parent in enumerate(shape.parents) if parent == node]
            found = next((c for r, c in enumerate(children) if draws.random() < (*rates(i), 0, 0, 0)[r]), None)
            if found is None:
                break
            path.append(node := found)
        controller.observe(request, ProposedTree(shape, ()), path, len(path))
        shapes.append(shape)
    return shapes


def test_where_rows_are_free_and_second_children_are_accepted_trees_are_drafted():
    (*_, last) = play(Planned(MEMORY_BOUND, 8, 32), lambda _: (0.5, 0.4, 0.3), 300)
    assert max(last.num_children) > 1
    assert last.num_nodes > 16


def test_where_second_children_are_never_accepted_chains_are_drafted():
    costs = CostTable(Curve(((1, 10.0), (64, 40.0))), Curve(((1, 0.5), (64, 0.6))))
    (*_, last) = play(Planned(costs, 8, 32), lambda _: (0.9,), 600)
    assert set(last.ranks) == {0}
    assert last.depth >= 7


def test_where_every_row_costs_a_pass_nothing_is_drafted_not_even_to_see():
    controller = Planned(ROWS_COST, 8, 32)
    assert controller._may_pay(1) is False
    shapes = play(controller, lambda _: (0.3, 0.1), 600)
    assert [shape for shape in shapes[8:] if shape.depth] == []


def test_where_little_is_accepted_probes_are_seldom_and_go_on():
    controller = Planned(CostTable(Curve(((1, 1.0), (64, 9.0))), Curve(((1, 0.3),))), 8, 32)
    shapes = play(controller, lambda _: (0.0,), 600)
    drafted = [shape for shape in shapes[-300:] if shape.depth]
    assert drafted == [controller.probe] * len(drafted)
    assert 1 <= len(drafted) <= 300 // 8


def test_a_batch_that_fills_the_device_is_not_probed_until_it_shrinks():
    """Not even tokens that are all accepted would pay for eight requests; for one they do."""
    full = CostTable(Curve(((1, 1.0), (8, 1.1), (9, 2.0), (64, 16.0))), Curve(((1, 0.05), (64, 0.8))), 0.05, 0.2)
    controller, batch = Planned(full, 8, 32), list(range(8))
    drafted = 0
    for at in range(400):
        for request, shape in zip(batch, controller.plan(batch), strict=True):
            drafted += shape.depth > 0 and at > 8
            controller.observe(request, ProposedTree(shape, ()), [*shape.trunk], len(shape.trunk))
    assert drafted == 0
    assert any(controller.plan([0])[0].depth for _ in range(8))


def test_a_draft_that_recovers_is_found_again():
    controller = Planned(CostTable(Curve(((1, 1.0), (64, 9.0))), Curve(((1, 0.3),))), 8, 32)
    shapes = play(controller, lambda i: (0.0,) if i < 100 else (0.97,), 1200)
    assert shapes[99].depth == 0
    assert shapes[-1].depth > 2


def test_a_new_request_begins_with_what_others_have_shown():
    controller = Planned(MEMORY_BOUND, 8, 32)
    first = controller.plan([1])[0]
    play(controller, lambda _: (0.95,), 400)
    (begun,) = controller.plan([2])
    assert begun.depth > first.depth or begun.num_nodes != first.num_nodes
    assert begun.depth == 8


def test_requests_differ_by_their_own_acceptance():
    controller = Planned(ROWS_COST_LIGHT, 8, 16)
    draws = random.Random(0)
    depths = {1: [], 2: []}
    for _ in range(640):
        for request, shape, rate in zip((1, 2), controller.plan([1, 2]), (0.95, 0.1), strict=True):
            depths[request].append(shape.depth)
            length = next((d for d in range(shape.depth) if draws.random() >= rate), shape.depth)
            path = [0, *shape.trunk[1 : length + 1]]
            controller.observe(request, ProposedTree(shape, ()), path, len(path))
    good, bad = (sum(depths[request][-320:]) for request in (1, 2))
    assert good >= 320 * 4.5
    assert bad < good / 8
    controller.forget(1)
    controller.forget(2)
    assert controller._requests == {}


ROWS_COST_LIGHT = CostTable(Curve(((1, 1.0), (64, 12.0))), Curve(((1, 0.1), (64, 0.5))))


@pytest.mark.parametrize("budget", [1, 2, 8])
def test_no_shape_is_larger_than_the_budget(budget):
    shapes = play(Planned(MEMORY_BOUND, 16, budget), lambda _: (0.9, 0.9, 0.9), 100)
    assert max(shape.num_nodes for shape in shapes) == budget + 1


def test_costs_that_are_measured_later_are_used():
    controller = Planned(CostTable.guessed(0.1), 8, 32)
    assert controller.plan([1])[0].depth > 0
    controller.costs = ROWS_COST
    shapes = play(controller, lambda _: (0.2,), 300, request=1)
    assert shapes[-2:] != [TreeShape.chain(8)] * 2
    assert sum(shape.depth == 0 for shape in shapes) > 200


def test_a_request_that_was_left_out_is_tried_again():
    controller = Planned(ROWS_COST_LIGHT, 8, 16)
    draws, drafted = random.Random(0), []
    for at in range(3000):
        rates = 0.9, 0.1 if at < 300 else 0.9
        for request, shape, rate in zip((1, 2), controller.plan([1, 2]), rates, strict=True):
            length = next((d for d in range(shape.depth) if draws.random() >= rate), shape.depth)
            path = [0, *shape.trunk[1 : length + 1]]
            controller.observe(request, ProposedTree(shape, ()), path, len(path))
        drafted.append(shape.depth > 0)
    assert sum(drafted[200:300]) <= 15
    assert all(drafted[-300:])


def test_a_tree_that_is_better_than_the_whole_menu_is_added_to_it():
    """Of a draft whose second children are accepted as often as its first, which no typical table says."""
    controller = Planned(MEMORY_BOUND, 8, 32)
    before = controller.menu.shapes
    (*_, last) = play(controller, lambda _: (0.45, 0.8, 0.8, 0.8), 1200)
    assert last in controller.menu.shapes[len(before) :]
    assert max(last.num_children) > 1


def test_a_plan_stays_while_another_is_hardly_better():
    controller = Planned(MEMORY_BOUND, 8, 32)
    menu, chances = controller.menu, controller.difficulty.chances()
    rates = PRIOR @ menu.emitted(chances) / menu.milliseconds(MEMORY_BOUND, 1)[1]
    best = menu.shapes[rates.argmax()]
    stayed = set()
    for at, (shape, rate) in enumerate(zip(menu.shapes, rates, strict=True)):
        controller = Planned(MEMORY_BOUND, 8, 32)
        controller._at = at
        stays = rate * WORTH > rates.max()
        assert controller.plan([1]) == [shape if stays else best]
        stayed.add(stays and shape != best)
    assert stayed == {False, True}


def test_what_short_requests_have_shown_is_known_of_all():
    controller = Planned(MEMORY_BOUND, 8, 32)
    before = controller.difficulty.stats.rates()[0, 0]
    for _ in range(20):
        play(controller, lambda _: (0.0,), 3)
        controller.forget(7)
    assert controller.difficulty.stats.rates()[0, 0] < before


def test_a_plan_does_not_outlive_its_requests():
    """A service numbers its requests from 0; the one before it on the same engine may have left in the middle."""
    controller = Planned(CostTable(Curve(((1, 0.2), (8, 0.3))), Curve(((1, 0.01),))), 8, 16)
    controller.plan([0])
    controller.forget(0)
    (shape,) = controller.plan([0])
    assert shape.depth
    assert isinstance(controller(0, 1, [0.9]), bool)
