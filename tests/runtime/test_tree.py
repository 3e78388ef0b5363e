"""Tree shapes: derived depths and trunks, and cutting."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lychee.runtime.tree import TreeShape


def test_a_chain_is_its_own_trunk():
    chain = TreeShape.chain(3)
    assert chain.parents == (-1, 0, 1, 2)
    assert chain.depths == chain.trunk == (0, 1, 2, 3)


def test_the_trunk_is_the_first_drawn_path():
    assert TreeShape((-1, 0, 1, 0, 1, 2)).trunk == (0, 1, 2, 5)


@pytest.mark.parametrize("parents", [(), (0,), (-1, 1), (-1, -1), (-1, 0, 5)])
def test_a_parent_comes_before_its_child(parents):
    with pytest.raises(ValueError, match="parents"):
        TreeShape(parents)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.data())
def test_a_cut_shape_is_a_shape_with_at_most_that_depth_and_size(data):
    size = data.draw(st.integers(1, 12))
    shape = TreeShape((-1, *(data.draw(st.integers(0, i - 1)) for i in range(1, size))))
    depth, nodes = data.draw(st.integers(-1, 6)), data.draw(st.integers(0, 13))
    cut = shape.cut(depth, nodes)
    assert cut.depth <= max(depth, 0)
    assert cut.num_nodes <= max(nodes, 1)
    if depth >= shape.depth and nodes >= shape.num_nodes:
        assert cut == shape
