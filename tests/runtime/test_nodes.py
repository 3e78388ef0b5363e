"""Rows of trees: which nodes a level drafts from, where each node's token is drawn, and what is left of dead ones."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lychee.models.layout import ints
from lychee.runtime.nodes import DraftPlan, Nodes
from lychee.runtime.tree import TreeShape


@st.composite
def shapes(draw, least=2):
    size = draw(st.integers(least, 12))
    return TreeShape((-1, *(draw(st.integers(0, i)) for i in range(size - 1))))


def paths(shape):
    found = [[0]]
    for node in range(1, shape.num_nodes):
        found.append([*found[shape.parents[node]], node])
    return found


def known(ancestors):
    return [node for node in ancestors.tolist() if node >= 0]


@given(st.lists(shapes(), min_size=1, max_size=3))
def test_every_node_s_token_is_drawn_once_for_its_parent_in_the_order_of_siblings(trees):
    plan = DraftPlan.of(tuple(trees))
    drawn_for = []  # (sequence, node, rank) of every draw
    for level in plan.levels:
        for seq, node in zip(level.frontier.seq_idx.tolist(), level.frontier.nodes.tolist(), strict=True):
            drawn_for += [(seq, node, rank) for rank in range(level.num_children)]
    assert len(drawn_for) == plan.num_draws
    at = 0
    for seq, shape in enumerate(trees):
        seen = dict.fromkeys(range(shape.num_nodes), 0)
        assert plan.drawn_at[at] == -1
        for node, parent in list(enumerate(shape.parents))[1:]:
            assert drawn_for[plan.drawn_at[at + node]] == (seq, parent, seen[parent])
            seen[parent] += 1
        at += shape.num_nodes


@given(st.lists(shapes(), min_size=1, max_size=3))
def test_a_level_runs_its_frontier_after_the_token_before_the_root(trees):
    plan = DraftPlan.of(tuple(trees))
    for depth, level in enumerate(plan.levels):
        rows = level.rows if level.logit_rows is None else level.rows.take(level.logit_rows)
        assert rows.nodes.tolist() == (level.frontier.nodes + 1).tolist()
        for seq, node, path in zip(rows.seq_idx.tolist(), level.frontier.nodes.tolist(), rows.ancestors, strict=True):
            assert known(path) == [0, *(ancestor + 1 for ancestor in paths(trees[seq])[node])]
            assert trees[seq].depths[node] == depth
        if level.token_from is not None:
            begin = sum(earlier.num_draws for earlier in plan.levels[: depth - 1])
            nodes = plan.cu_nodes[level.frontier.seq_idx] + level.frontier.nodes
            assert (level.token_from + begin).tolist() == plan.drawn_at[nodes].tolist()
            every = level.token_from.tolist() == list(range(plan.levels[depth - 1].num_draws))
            assert level.takes_all == every


@given(st.lists(shapes(least=1), min_size=1, max_size=3), st.data())
def test_dead_nodes_leave_rows_that_keep_their_slots_and_paths(trees, data):
    nodes = Nodes.of(tuple(trees))
    tokens, at = [], 0
    for shape in trees:
        for node, parent in enumerate(shape.parents):
            dead = node and (tokens[at + parent] < 0 or data.draw(st.integers(0, 3)) == 0)
            tokens.append(-1 if dead else 7)
        at += shape.num_nodes
    left = nodes.alive(ints(tokens))
    assert left.rows.tolist() == [row for row, token in enumerate(tokens) if token >= 0]
    bounds = list(pairwise(left.layout.cu_seqlens_q.tolist()))
    every = left.ids([range(end - first) for first, end in bounds])
    for seq, (first, end) in enumerate(bounds):
        ids = left.layout.nodes[first:end].tolist()
        assert ids == [n for n in range(trees[seq].num_nodes) if tokens[int(nodes.layout.cu_seqlens_q[seq]) + n] >= 0]
        for row, node in enumerate(ids):
            assert known(left.layout.ancestors[first + row]) == paths(trees[seq])[node]
            parent = left.parents[first + row]
            assert (ids[parent] if parent >= 0 else -1) == trees[seq].parents[node]
        assert every[seq] == tuple(ids)


def test_what_was_not_drawn_buries_what_is_below_and_first_children_are_told():
    plan = DraftPlan.of((TreeShape((-1, 0, 0, 1, 2, 2)), TreeShape((-1, 0))))
    tokens = np.array([5, 6, -1, 7, 8, 9, 5, 4], np.int32)
    assert plan.bury(tokens, 3) == [6, 7, 4]
    assert tokens.tolist() == [5, 6, -1, 7, -1, -1, 5, 4]
    tokens = np.array([5, -1, 6, 7, 8, 9, 5, 4], np.int32)
    assert plan.bury(tokens, 3) == [-1, 8, 4]
    tokens = np.array([5, 6, 3, -1, -1, -1, 5, 4], np.int32)
    assert plan.bury(tokens, 1) == [6, 4]


@given(st.lists(shapes(), min_size=1, max_size=3), st.integers(1, 4))
def test_segments_draw_every_node_once_after_its_parent(trees, step):
    plan = DraftPlan.of(tuple(trees))
    known = set(plan.cu_nodes[:-1].tolist())
    for first in range(0, len(plan.levels), step):
        segment = plan.segment(first, min(first + step, len(plan.levels)))
        frontier = segment.levels[0].frontier
        assert segment.token_rows.tolist() == (plan.cu_nodes[frontier.seq_idx] + frontier.nodes).tolist()
        assert known.issuperset(segment.token_rows.tolist())
        assert (segment.drawn_at + plan.draws_before(first)).tolist() == plan.drawn_at[segment.nodes].tolist()
        assert not known & set(segment.nodes.tolist())
        known |= set(segment.nodes.tolist())
    assert known == set(range(len(plan.parents)))


def test_what_comes_again_is_computed_once():
    trees = (TreeShape.chain(3), TreeShape((-1, 0, 0)))
    assert DraftPlan.of(trees) is DraftPlan.of((TreeShape((-1, 0, 1, 2)), TreeShape((-1, 0, 0))))
    assert Nodes.of(trees) is Nodes.of(trees)
    assert Nodes.of(trees).alive(ints([1] * 7)) is Nodes.of(trees)
