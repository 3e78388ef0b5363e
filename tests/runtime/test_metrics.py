"""What the numbers of a report mean, round by round."""

import pytest

from lychee.runtime.metrics import Metrics, RequestStats, tree_name
from lychee.runtime.tree import TreeShape

WIDE = TreeShape.widths((2, 2))  # nodes 0 to 6, the trunk 0, 1, 2


def test_nodes_and_trunk_are_counted_apart():
    stats = RequestStats()
    stats.add_round(WIDE, (0, 1, 2), 3, False)
    assert (stats.drafted, stats.accepted, stats.trunk_drafted, stats.trunk_accepted) == (6, 2, 2, 2)
    off = next(node for node in range(7) if WIDE.parents[node] == 0 and node != 1)
    stats.add_round(WIDE, (0, off), 2, False)
    assert (stats.drafted, stats.accepted, stats.trunk_drafted, stats.trunk_accepted) == (12, 3, 4, 2)
    metrics = Metrics()
    metrics.add(stats)
    totals = metrics.totals()
    assert totals["acceptance_rate"] == totals["trunk_accepted"] / totals["trunk_drafted"] == 0.5
    assert totals["wasted_fraction"] == 1 - totals["accepted"] / totals["drafted"] == 0.75


def test_of_a_chain_all_nodes_are_the_trunk():
    stats = RequestStats()
    stats.add_round(TreeShape.chain(4), (0, 1, 2), 3, False)
    assert (stats.drafted, stats.accepted) == (stats.trunk_drafted, stats.trunk_accepted) == (4, 2)


def test_rounds_are_told_by_their_trees_most_frequent_first_and_native_ones_apart():
    metrics, odd = Metrics(), TreeShape((-1, 0, 1, 0))
    for shapes in ([TreeShape.chain(4), WIDE, TreeShape.chain(0), WIDE], [WIDE, odd, TreeShape.chain(4)]):
        stats = RequestStats()
        for shape in shapes:
            stats.add_round(shape, (0,), 1, False)
        metrics.add(stats)
    totals = metrics.totals()
    assert (totals["rounds"], totals["rounds_native"]) == (7, 1)
    assert totals["rounds_by_tree"] == [
        {"tree": "2,2", "rounds": 3},
        {"tree": "chain of 4", "rounds": 2},
        {"tree": "2; 1,0", "rounds": 1},
    ]


@pytest.mark.parametrize("number", [1, 5, 32])
def test_trees_are_named_as_the_option_has_them(number):
    assert tree_name(TreeShape.chain(number)) == f"chain of {number}"
    assert tree_name(TreeShape.widths((3, 2, 1))) == "3,2,1"
    assert tree_name(TreeShape.widths((1, 2))) == "1,2"
    assert tree_name(TreeShape((-1, 0, 0, 1, 2, 2))) == "2; 1,2"
