"""Planned trees are the best of all trees, found by trying them all, and have only the sizes of their buckets."""

import random
import time
from itertools import pairwise
from math import inf, isclose, prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lychee.runtime.cost_table import CostTable, Curve
from lychee.runtime.planner import plan
from lychee.runtime.shape_buckets import ShapeBuckets, shape_buckets
from lychee.runtime.tree import TreeShape

MOST_DRAFTED, MOST_CHILDREN = 7, 4


def charged(buckets, shape):
    """The frontier width that a shape is charged for."""
    return min(width for width in buckets.widths if width >= max(map(len, shape.frontiers), default=1))


FLAT = CostTable(Curve(((1, 1.0), (64, 1.0))), Curve(((1, 1e-6),)))


def every_tree(drafted):
    """Each plane tree once: in depth-first order a node's parent is the node before it or one of that one's path."""
    trees = [(-1,)]
    for _ in range(drafted):
        grown = []
        for parents in trees:
            parent = len(parents) - 1
            while parent >= 0:
                grown.append((*parents, parent))
                parent = parents[parent]
        trees = grown
    return [TreeShape(parents) for parents in trees]


TREES = [tree for drafted in range(MOST_DRAFTED + 1) for tree in every_tree(drafted)]


def test_every_tree_is_tried():
    catalan = [1, 1, 2, 5, 14, 42, 132, 429]
    assert len(TREES) == len({tree.parents for tree in TREES}) == sum(catalan)


def expected(shape, accept):
    """Emitted tokens by the definition, or None where the table has no such node."""
    paths = [()]
    for node in range(1, shape.num_nodes):
        rank = sum(1 for other in range(node) if shape.parents[other] == shape.parents[node])
        paths.append((*paths[shape.parents[node]], rank))
    if any(len(path) > len(accept) or path[-1] >= len(accept[len(path) - 1]) for path in paths[1:]):
        return None
    return sum(prod(accept[depth][rank] for depth, rank in enumerate(path)) for path in paths)


def milliseconds(shape, costs, buckets, num_seqs):
    """A round by the definition, or None where no bucket has the shape."""
    drawing = set(shape.parents) - {-1}
    width = max((sum(shape.depths[n] == d for n in drawing) for d in range(1, shape.depth)), default=1)
    padded = min((w for w in buckets.widths if w >= width), default=None)
    if shape.num_nodes not in buckets.rows or shape.depth not in buckets.depths or padded is None:
        return None
    levels = [1, *[padded] * (shape.depth - 1)] if shape.depth else []
    draft = sum(costs.draft(w * num_seqs) for w in levels) + (costs.drafting if levels else 0)
    return costs.verify(shape.num_nodes * num_seqs) + draft + costs.overhead


def sizes(least, most):
    return st.sets(st.integers(least + 1, most), max_size=most).map(lambda more: (least, *sorted(more)))


RATES = st.one_of(st.sampled_from((0.0, 0.25, 0.5, 1.0)), st.floats(0, 1))
LEVELS = st.lists(RATES, min_size=1, max_size=MOST_CHILDREN).map(lambda rates: tuple(sorted(rates, reverse=True)))
TABLES = st.lists(LEVELS, max_size=MOST_DRAFTED).map(tuple)
POINTS = st.dictionaries(st.integers(1, 24), st.floats(0.01, 4), min_size=1, max_size=6)
CURVES = POINTS.map(lambda points: Curve(tuple(sorted(points.items()))))
COSTS = st.builds(CostTable, CURVES, CURVES, st.sampled_from((0.0, 0.5, 5.0)))
ALL_SIZES = ShapeBuckets(tuple(range(1, 9)), tuple(range(8)), tuple(range(1, 8)))
BUCKETS = st.one_of(st.just(ALL_SIZES), st.builds(ShapeBuckets, sizes(1, 8), sizes(0, 7), sizes(1, 7)))


def planned_as_the_best_of_all(accept, costs, buckets, num_seqs=1):
    best = 0.0
    for tree in TREES:
        cost = milliseconds(tree, costs, buckets, num_seqs)
        tokens = None if cost is None else expected(tree, accept)
        if tokens is not None:
            best = max(best, tokens / cost)
    planned = plan(accept, costs, buckets, num_seqs)
    assert isclose(planned.emitted, expected(planned.shape, accept), rel_tol=1e-12)
    assert isclose(planned.milliseconds, milliseconds(planned.shape, costs, buckets, num_seqs), rel_tol=1e-12)
    assert isclose(planned.emitted / planned.milliseconds, best, rel_tol=1e-12)
    size = planned.shape.num_nodes, planned.shape.depth, charged(buckets, planned.shape)
    assert planned.milliseconds == costs.milliseconds(*size, num_seqs)
    return planned.shape


@settings(derandomize=True, max_examples=150, deadline=None)
@given(TABLES, COSTS, BUCKETS, st.integers(1, 3))
def test_no_tree_emits_more_per_millisecond_than_the_planned_one(accept, costs, buckets, num_seqs):
    planned_as_the_best_of_all(accept, costs, buckets, num_seqs)


def test_the_best_of_all_trees_is_planned_also_where_it_is_wide_and_deep():
    """Good drafts that cost little: the best tree often draws from several nodes of a level."""
    draws, wide, shapes = random.Random(0), 0, set()
    for _ in range(200):
        most = draws.random()
        accept = tuple(tuple(sorted((most * draws.random() for _ in range(3)), reverse=True)) for _ in range(5))
        verify = Curve(tuple((rows, 1 + 0.05 * rows * draws.random()) for rows in (1, 2, 3, 5, 8)))
        draft = Curve(tuple((rows, 0.05 * (1 + rows) * draws.random()) for rows in (1, 2, 3, 5)))
        buckets = draws.choice((ALL_SIZES, ShapeBuckets((1, 3, 5, 8), (0, 2, 3), (1, 2, 7))))
        shape = planned_as_the_best_of_all(accept, CostTable(verify, draft, 0.5, 0.3), buckets)
        wide += max(map(len, shape.frontiers), default=0) > 1
        shapes.add(shape)
    assert wide > 50
    assert len(shapes) > 50
    assert {shape.depth for shape in shapes} >= {0, 1, 2, 3, 4}


@settings(derandomize=True, max_examples=100, deadline=None)
@given(TABLES, COSTS, BUCKETS)
def test_planned_trees_are_trunk_first_and_then_by_what_nodes_bring(accept, costs, buckets):
    shape = plan(accept, costs, buckets).shape
    assert shape.trunk == tuple(range(shape.depth + 1))
    grown = [expected(shape.cut(shape.depth, nodes), accept) for nodes in range(shape.depth + 1, shape.num_nodes + 1)]
    gains = [after - before for before, after in pairwise(grown)]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(gains))


def falling(first, depth=16, children=8):
    """A table in which the child of rank r is accepted with first / (r + 1) once the earlier ones are rejected."""
    ranks, left = [], 1.0
    for rank in range(children):
        ranks.append(left * first / (rank + 1))
        left -= ranks[-1]
    return (tuple(ranks),) * depth


def test_a_plan_takes_less_than_five_milliseconds():
    costs, buckets = CostTable(Curve(((1, 10.0), (64, 12.0))), Curve(((1, 0.5), (64, 0.6))), 0.5), shape_buckets(64, 16)
    taken = []
    for first in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95):
        start = time.thread_time()
        plan.__wrapped__(falling(first), costs, buckets)
        taken.append(time.thread_time() - start)
    assert min(taken) < 0.005


def test_rows_that_cost_nothing_are_all_used():
    buckets = shape_buckets(63, 16)
    assert plan(falling(0.6), FLAT, buckets).shape.num_nodes == 64


def test_where_every_draft_level_costs_much_the_tree_is_wide_and_flat():
    costs = CostTable(Curve(((1, 1.0), (64, 1.0))), Curve(((1, 50.0),)))
    assert plan(falling(0.6), costs, ShapeBuckets((1, 9), (0, 1, 2), (1, 8))).shape.num_nodes == 1
    cheaper = CostTable(Curve(((1, 100.0), (64, 100.0))), Curve(((1, 30.0),)))
    assert plan(falling(0.6), cheaper, ShapeBuckets((1, 9), (0, 1, 2), (1, 8))).shape == TreeShape.widths((8,))


def test_where_frontier_rows_cost_much_only_the_trunk_branches():
    costs = CostTable(Curve(((1, 10.0), (64, 10.0))), Curve(((1, 0.5), (2, 10.0))))
    shape = plan(falling(0.6), costs, shape_buckets(32, 8)).shape
    assert shape.num_nodes == 33
    assert shape.depth > 2
    assert set(map(len, shape.frontiers)) == {1}


def test_nothing_accepted_and_a_full_device_are_decoded_natively():
    flat = CostTable(Curve(((1, 10.0), (64, 12.0), (128, 24.0))), Curve(((1, 1.0),)))
    assert plan(falling(0.0), flat, shape_buckets(64, 8)).shape == TreeShape.chain(0)
    alone, among_many = (
        plan(falling(0.6), flat, shape_buckets(64, 8)),
        plan(falling(0.6), flat, shape_buckets(64, 8), 64),
    )
    assert alone.shape.num_nodes > 1
    assert among_many.shape == TreeShape.chain(0)


def test_a_tie_goes_to_the_smaller_shape():
    free = CostTable(Curve(((1, 1.0), (64, 1.0))), Curve(((1, 1.0),)))
    assert plan(((1.0,),) * 8, free, shape_buckets(8, 8)).shape == TreeShape.chain(0)  # one more token, one more ms
    assert plan(((0.5, 0.0, 0.0),), FLAT, shape_buckets(8, 8)).shape == TreeShape.chain(1)  # others bring nothing


@pytest.mark.parametrize("accept", [((0.2, 0.3),), ((1.1,),), ((0.5, -0.1),), ((float("nan"),),), ((),)])
def test_tables_that_are_no_falling_probabilities_are_refused(accept):
    with pytest.raises(ValueError, match=r"accept is .* must have .* probabilities that do not rise with the rank"):
        plan(accept, FLAT, ALL_SIZES)


# Buckets


@pytest.mark.parametrize(("budget", "depth"), [(1, 1), (5, 16), (16, 4), (23, 16), (63, 16), (64, 32)])
def test_buckets_reach_their_limits_and_no_further(budget, depth):
    buckets = shape_buckets(budget, depth)
    assert buckets.rows[-1] == budget + 1
    assert buckets.depths[-1] == min(budget, depth)
    assert all(one + 1 in buckets.rows for one in buckets.depths[:-1])  # a chain of each depth


def test_few_sizes_serve_every_table():
    buckets = shape_buckets(64, 16)
    gpu = CostTable(Curve(((1, 10.0), (64, 12.0))), Curve(((1, 0.5), (64, 0.6))))
    cpu = CostTable(Curve(((1, 0.45), (9, 0.7), (17, 1.3))), Curve(((1, 0.12), (9, 0.13), (17, 0.21))))
    planned = {plan(falling(first / 100), costs, buckets).shape for first in range(100) for costs in (gpu, cpu)}
    verified = {(shape.num_nodes, shape.depth) for shape in planned}
    drafted = {(shape.depth, charged(buckets, shape)) for shape in planned}
    assert len(verified | drafted) < 40 < len(planned)


@pytest.mark.parametrize("rows", [(), (2, 3), (1, 3, 2), (1, 1, 2)])
def test_buckets_that_do_not_rise_from_plain_decoding_are_refused(rows):
    with pytest.raises(ValueError, match=r"rows is .* must start with 1 and rise"):
        ShapeBuckets(rows, (0,), (1,))


# Costs


@settings(derandomize=True, max_examples=200, deadline=None)
@given(POINTS)
def test_a_curve_never_falls_and_meets_its_points_where_they_rise(points):
    curve = Curve(tuple(sorted(points.items())))
    values = [curve(rows) for rows in range(1, 200)]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(values))
    for rows, ms in points.items():
        assert curve(rows) == max(other for at, other in points.items() if at <= rows) >= ms


def test_a_curve_is_linear_between_points_flat_before_and_proportional_after():
    curve = Curve(((2, 1.0), (6, 3.0)))
    assert [curve(rows) for rows in (1, 2, 3, 5, 6, 12)] == [1.0, 1.0, 1.5, 2.5, 3.0, 6.0]


@pytest.mark.parametrize(
    "points", [(), ((0, 1.0),), ((2, 1.0), (1, 1.0)), ((1, 1.0), (1, 2.0)), ((1, 0.0),), ((1, inf),)]
)
def test_points_that_are_no_measurements_are_refused(points):
    with pytest.raises(ValueError, match="points is"):
        Curve(points)
    with pytest.raises(ValueError, match="overhead is -1"):
        CostTable(Curve(((1, 1.0),)), Curve(((1, 1.0),)), -1)
