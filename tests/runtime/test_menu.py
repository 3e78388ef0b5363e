"""A menu weighs its shapes as the planner does, keeps within the budget, and has a shape that is nearly the best."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lychee.runtime.cost_table import CostTable, Curve
from lychee.runtime.menu import Menu, typical
from lychee.runtime.planner import plan, planned
from lychee.runtime.shape_buckets import shape_buckets
from lychee.runtime.tree import TreeShape

DEPTH, CHILDREN = 8, 4
COSTS = CostTable(Curve(((1, 2.0), (4, 2.5), (16, 6.0))), Curve(((1, 0.2), (8, 0.3))), 0.1, 0.3)
SHAPES = [TreeShape.chain(1), TreeShape.chain(8), TreeShape.widths((4, 2, 1)), TreeShape.widths((2, 2, 2, 1, 1))]
RATES = st.lists(st.floats(0.05, 0.98), min_size=DEPTH, max_size=DEPTH)


def table_of(rates):
    return tuple(typical(rate, 1, CHILDREN)[0] for rate in rates)


@settings(deadline=None)
@given(RATES)
def test_shapes_are_expected_to_emit_what_the_planner_says(rates):
    table = table_of(rates)
    expected = [planned(shape, table, COSTS).emitted for shape in SHAPES]
    assert Menu(SHAPES, DEPTH, CHILDREN).emitted(table) == pytest.approx(expected)


def test_a_child_that_is_never_accepted_brings_nothing():
    table = ((0.5, 0.0, 0.0, 0.0),) * DEPTH
    assert Menu(SHAPES, DEPTH, CHILDREN).emitted(table)[2] == pytest.approx(1 + 0.5 + 0.25 + 0.125)


@pytest.mark.parametrize("num_seqs", [1, 3, 8])
def test_rounds_cost_what_the_cost_table_says(num_seqs):
    costs = Menu(SHAPES, DEPTH, CHILDREN).milliseconds(COSTS, num_seqs)
    assert costs.shape == (num_seqs + 1, len(SHAPES))
    assert costs[0] == pytest.approx([COSTS.milliseconds(1, 0, 1, num_seqs)] * len(SHAPES))
    for i, shape in enumerate(SHAPES):
        assert costs[-1, i] == pytest.approx(COSTS.milliseconds(shape.num_nodes, shape.depth, shape.width, num_seqs))


def test_sequences_that_draft_nothing_add_a_row_each():
    costs = Menu(SHAPES, DEPTH, CHILDREN).milliseconds(COSTS, 3)
    assert costs[1, 1] == pytest.approx(COSTS.verify(9 + 2) + COSTS.drafting + 8 * COSTS.draft(1) + COSTS.overhead)


@given(st.lists(st.integers(1, 200), min_size=1))
def test_a_curve_gives_many_costs_as_it_gives_one(rows):
    assert COSTS.verify.of(np.array(rows)) == pytest.approx([COSTS.verify(n) for n in rows])


@pytest.mark.parametrize(("budget", "depth"), [(1, 1), (2, 2), (5, 3), (16, 8), (32, 16)])
def test_shapes_keep_within_the_budget_and_short_chains_are_there(budget, depth):
    menu = Menu.of(shape_buckets(budget, depth), COSTS, CHILDREN)
    assert max(shape.num_nodes for shape in menu.shapes) <= budget + 1
    assert max(shape.depth for shape in menu.shapes) <= min(depth, budget)
    assert {TreeShape.chain(length) for length in (1, 2, 3) if length <= min(budget, depth)} <= set(menu.shapes)
    assert len(menu.shapes) == len(set(menu.shapes))


def test_shapes_that_are_good_for_no_draft_are_left_out():
    dear_rows = CostTable(Curve(((1, 1.0), (32, 32.0))), Curve(((1, 0.01),)))
    assert max(shape.num_nodes for shape in Menu.of(shape_buckets(32, 16), dear_rows, CHILDREN).shapes) <= 6
    free_rows = CostTable(Curve(((1, 1.0), (32, 1.0))), Curve(((1, 0.01), (8, 0.01))))
    shapes = Menu.of(shape_buckets(32, 16), free_rows, CHILDREN).shapes
    assert TreeShape.chain(5) not in shapes
    assert {TreeShape.chain(length) for length in (1, 2, 3)} < set(shapes)
    assert max(shape.num_nodes for shape in shapes) > 20


COST_TABLES = st.builds(
    lambda slope, share, drafting: CostTable(
        Curve(((1, 1.0), (4, 1.0 + slope), (32, 1.0 + 12 * slope))),
        Curve(((1, share), (8, 1.5 * share))),
        0.02,
        drafting,
    ),
    st.floats(0.0, 0.5),
    st.floats(0.02, 0.3),
    st.floats(0.0, 0.2),
)


@settings(deadline=None, max_examples=60)
@given(st.floats(0.3, 0.95), COST_TABLES)
def test_the_best_of_the_menu_is_hardly_worse_than_the_best_of_all(rate, costs):
    buckets, table = shape_buckets(32, 16), typical(rate, 16, CHILDREN)
    menu = Menu.of(buckets, costs, CHILDREN)
    best = plan(table, costs, buckets).rate
    rates = menu.emitted(table) / menu.milliseconds(costs, 1)[1]
    assert max(rates.max(), planned(TreeShape.chain(0), table, costs).rate) >= 0.95 * best
