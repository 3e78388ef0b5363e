"""Tree shapes: what follows from the parents, cutting, widths, and the option `tree`."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lychee.runtime.checks import ParameterError
from lychee.runtime.tree import TreeShape, parse_tree

SHAPES = st.integers(0, 11).flatmap(
    lambda drafted: st.tuples(*(st.integers(0, i) for i in range(drafted))).map(lambda p: TreeShape((-1, *p)))
)
WIDTHS = st.lists(st.integers(1, 3), max_size=4).map(tuple)


def path_of(shape, node):
    """Ranks from the root to the node."""
    return () if node == 0 else (*path_of(shape, shape.parents[node]), shape.ranks[node])


def test_a_chain_is_its_own_trunk():
    chain = TreeShape.chain(3)
    assert chain.parents == (-1, 0, 1, 2)
    assert chain.depths == chain.trunk == (0, 1, 2, 3)
    assert chain.frontiers == ((0,), (1,), (2,))
    assert TreeShape.chain(0).frontiers == ()
    assert TreeShape.widths((1, 1, 1)) == chain


def test_the_trunk_is_the_first_drawn_path():
    assert TreeShape((-1, 0, 1, 0, 1, 2)).trunk == (0, 1, 2, 5)


def test_siblings_rank_by_id_and_levels_hold_every_node_of_a_depth():
    shape = TreeShape((-1, 0, 1, 0, 1, 0, 3))
    assert shape.ranks == (0, 0, 0, 1, 1, 2, 0)
    assert shape.num_children == (3, 2, 0, 1, 0, 0, 0)
    assert shape.levels == ((0,), (1, 3, 5), (2, 4, 6))
    assert shape.frontiers == ((0,), (1, 3))


@settings(derandomize=True, max_examples=200, deadline=None)
@given(SHAPES)
def test_no_two_nodes_have_the_same_ranks_on_their_paths(shape):
    assert len({path_of(shape, node) for node in range(shape.num_nodes)}) == shape.num_nodes
    assert sorted(node for level in shape.levels for node in level) == list(range(shape.num_nodes))


@pytest.mark.parametrize("parents", [(), (0,), (-1, 1), (-1, -1), (-1, 0, 5)])
def test_a_parent_comes_before_its_child(parents):
    with pytest.raises(ValueError, match="parents"):
        TreeShape(parents)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(SHAPES, st.integers(-1, 6), st.integers(0, 13))
def test_a_cut_shape_is_a_shape_with_at_most_that_depth_and_size(shape, depth, nodes):
    cut = shape.cut(depth, nodes)
    assert cut.depth <= max(depth, 0)
    assert cut.num_nodes <= max(nodes, 1)
    if depth >= shape.depth and nodes >= shape.num_nodes:
        assert cut == shape


@settings(derandomize=True, max_examples=100, deadline=None)
@given(WIDTHS)
def test_widths_are_the_numbers_of_children_by_depth(widths):
    shape = TreeShape.widths(widths)
    assert all(
        shape.num_children[node] == (widths[depth] if depth < len(widths) else 0)
        for node, depth in enumerate(shape.depths)
    )
    assert shape.depth == len(widths)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(WIDTHS, st.integers(0, 5), st.integers(1, 130))
def test_a_cut_keeps_the_trunk_first_and_drops_later_draws_before_earlier_ones(widths, depth, nodes):
    shape = TreeShape.widths(widths)
    cut = shape.cut(depth, nodes)
    assert cut.trunk == tuple(range(min(len(widths), depth, nodes - 1) + 1))
    passed_over = [sum(path_of(cut, node)) for node in range(cut.num_nodes)]
    assert passed_over == sorted(passed_over)
    lost = {path_of(shape, n) for n in range(shape.num_nodes) if shape.depths[n] <= depth} - {
        path_of(cut, n) for n in range(cut.num_nodes)
    }
    assert all(sum(path) >= passed_over[-1] for path in lost)


def test_widths_below_one_are_refused():
    with pytest.raises(ValueError, match=r"widths is \(2, 0\), must be of at least 1"):
        TreeShape.widths((2, 0))


def test_the_option_takes_a_word_or_widths():
    assert parse_tree("auto", 1, 1) == "auto"
    assert parse_tree("chain", 1, 1) == "chain"
    assert parse_tree("4,2,2,1,1", 60, 5) == TreeShape.widths((4, 2, 2, 1, 1))
    assert parse_tree(" 3, 02", 9, 2) == TreeShape.widths((3, 2))


NUMBERS = "must be auto, chain, or numbers of children by depth, of at least 1, such as 4,2,2,1,1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, NUMBERS) for text in ("", " ", ",", "2,", "2,,1", "0", "2,0", "-1", "+2", "2.5", "1_0", "٣", "Auto")),
        *((given, NUMBERS) for given in (None, 3, [4, 2], b"4", "9" * 5000)),
        ("1,1,1,1,1,1", "must be at most 5 numbers long"),
        ("4,2,2,1,2", "must be a tree of at most 60 drafted nodes, and this one has 76"),
        ("999999999,999999999", "must be a tree of at most 60 drafted nodes"),
    ],
)
def test_a_bad_tree_is_refused_in_a_sentence(text, message):
    with pytest.raises(ParameterError) as caught:
        parse_tree(text, 60, 5)
    assert str(caught.value).startswith(f"tree is {text!r}, {message}")
    assert "\n" not in str(caught.value)
