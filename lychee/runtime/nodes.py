"""The nodes of a round's trees as rows: those that the target verifies, and those that the draft runs, level by level.

All of it follows from the trees' shapes, and is computed once for those that come again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from lychee.models.layout import Ints, Layout, ints

from .tree import TreeShape

Shapes = tuple[TreeShape, ...]


@dataclass(frozen=True, eq=False)
class Nodes:
    """Rows of the target's pass over one tree per sequence.

    parents: rows of the same sequence, -1 for roots. rows: which of all the trees' nodes they are.
    """

    layout: Layout
    parents: Ints
    rows: Ints

    @staticmethod
    @lru_cache(maxsize=256)
    def of(shapes: Shapes) -> Nodes:
        """All nodes."""
        parents = ints([p for shape in shapes for p in shape.parents])
        layout = Layout.trees(tuple(shape.parents for shape in shapes))
        return Nodes(layout, parents, np.arange(len(parents), dtype=np.int32))

    def alive(self, tokens: Ints) -> Nodes:
        """Without the nodes whose token is -1. None of what is left is a child of theirs."""
        return self if tokens.min() >= 0 else self._alive((tokens >= 0).tobytes())

    @lru_cache(maxsize=256)  # noqa: B019 - all of them are few
    def _alive(self, mask: bytes) -> Nodes:
        rows = np.flatnonzero(np.frombuffer(mask, np.bool_)).astype(np.int32)
        layout, before = self.layout.take(rows), self.layout.cu_seqlens_q
        new = np.zeros(len(mask), np.int32)
        new[rows] = np.arange(len(rows), dtype=np.int32) - layout.cu_seqlens_q[layout.seq_idx]
        parents = self.parents[rows]
        parents = np.where(parents < 0, -1, new[before[layout.seq_idx] + parents]).astype(np.int32)
        return Nodes(layout, parents, rows)

    def ids(self, rows: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
        """Nodes of their trees, for rows of each sequence."""
        firsts = self.layout.cu_seqlens_q.tolist()
        return tuple(
            tuple(int(self.layout.nodes[first + row]) for row in some)
            for first, some in zip(firsts, rows, strict=False)
        )


@dataclass(frozen=True, eq=False)
class Level:
    """One pass of the draft, and the draws after it.

    frontier: the nodes whose children are drawn, `num_children` for each.
    rows: the pass's rows. Each sequence's context ends one token before its tree's root, and the root's level has a row
        for that token too, because it may lack draft KV. Where it does not it is computed again, to the same bits.
    logit_rows: those rows that are the frontier's; None: all.
    token_from: which of the draws of the level above, row by row, are the rows' tokens; None at the root's level.
    takes_all: those are all of them, in order.
    """

    frontier: Layout
    rows: Layout
    logit_rows: Ints | None
    token_from: Ints | None
    takes_all: bool
    num_children: int

    @property
    def num_draws(self) -> int:
        return len(self.frontier.nodes) * self.num_children

    @cached_property
    def key(self) -> tuple[int, ...]:
        """What a program for it depends on."""
        rows = self.rows
        return len(self.frontier.nodes), len(rows.nodes), rows.max_rows, self.num_children, self.takes_all


@dataclass(frozen=True, eq=False)
class DraftPlan:
    """How trees are drafted, each of at least two nodes; here they are counted through all trees.

    drawn_at: a node's place among all draws, -1 for roots. parents: -1 for roots. cu_nodes: where each tree begins.
    """

    levels: tuple[Level, ...]
    drawn_at: Ints
    parents: Ints
    depths: Ints
    cu_nodes: Ints

    @staticmethod
    @lru_cache(maxsize=256)
    def of(shapes: Shapes) -> DraftPlan:
        layout = Nodes.of(shapes).layout
        first = layout.cu_seqlens_q
        parents = [-1 if p < 0 else int(start) + p for s, start in zip(shapes, first, strict=False) for p in s.parents]
        drawn_at = np.full(len(parents), -1, np.int32)
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        levels: list[Level] = []
        start = begin = 0
        inner = [node for node in children if node >= 0]
        for depth in range(1 + max(int(layout.depths[node]) for node in inner)):
            nodes = ints(sorted(node for node in inner if layout.depths[node] == depth))
            most = max(len(children[node]) for node in nodes.tolist())
            for row, node in enumerate(nodes.tolist()):
                drawn_at[children[node]] = begin + row * most + np.arange(len(children[node]))
            frontier = layout.take(nodes)
            if depth:
                token_from = drawn_at[nodes] - np.int32(start)
                takes_all = np.array_equal(token_from, np.arange(levels[-1].num_draws))
                level = Level(frontier, frontier.after(1), None, token_from, takes_all, most)
            else:
                pairs, seconds = Layout.trees(((-1, 0),) * len(shapes)), np.arange(1, 2 * len(shapes), 2)
                level = Level(frontier, pairs, ints(seconds), None, False, most)
            levels.append(level)
            start, begin = begin, begin + level.num_draws
        return DraftPlan(tuple(levels), drawn_at, ints(parents), layout.depths, first)

    @lru_cache(maxsize=256)  # noqa: B019 - plans are kept anyway
    def segment(self, first: int, last: int) -> Segment:
        """The levels that draw from depth `first` on, up to `last` exclusively."""
        return Segment(self, first, self.levels[first:last])

    @property
    def num_draws(self) -> int:
        return self.draws_before(len(self.levels))

    def draws_before(self, level: int) -> int:
        return sum(level.num_draws for level in self.levels[:level])

    def bury(self, tokens: Ints, depth: int) -> list[int]:
        """Where nodes are dead (-1), because there were fewer tokens to draw than children, so is all below them.

        depth: of what has been drafted. Returns the tokens of live nodes' first children, which are always drawn if
        logits are finite.
        """
        first, known = [], set[int]()
        for row, (parent, at) in enumerate(zip(self.parents.tolist(), self.depths.tolist(), strict=True)):
            if at > depth:
                continue
            if parent >= 0 and tokens[parent] < 0:
                tokens[row] = -1
            elif parent >= 0 and parent not in known:
                known.add(parent)
                first.append(int(tokens[row]))
        return first


@dataclass(frozen=True, eq=False)
class Segment:
    """Levels that are drafted together, by one program; the first of them draws from depth `first`."""

    plan: DraftPlan
    first: int
    levels: tuple[Level, ...]

    @property
    def last(self) -> int:
        """Down to this depth nodes have been drawn once it has run."""
        return self.first + len(self.levels)

    @cached_property
    def key(self) -> tuple[tuple[int, ...], ...]:
        """Segments with the same key and `first` are drafted by the same program."""
        return tuple(level.key for level in self.levels)

    @cached_property
    def rows(self) -> Layout:
        """The rows of all levels; they make no pass."""
        return _together([level.rows for level in self.levels])

    @cached_property
    def frontier(self) -> Layout:
        """The frontiers of all levels."""
        return _together([level.frontier for level in self.levels])

    @cached_property
    def nodes(self) -> Ints:
        """The nodes drawn."""
        depths = self.plan.depths
        return np.flatnonzero((depths > self.first) & (depths <= self.last)).astype(np.int32)

    @cached_property
    def drawn_at(self) -> Ints:
        """Of `nodes`, their places among the segment's draws."""
        at: Ints = self.plan.drawn_at[self.nodes] - np.int32(self.plan.draws_before(self.first))
        return at

    @cached_property
    def token_rows(self) -> Ints:
        """The nodes that the first level's rows are; not of the root's level, whose rows are two tokens each."""
        frontier = self.levels[0].frontier
        rows: Ints = self.plan.cu_nodes[frontier.seq_idx] + frontier.nodes
        return rows


def _together(parts: list[Layout]) -> Layout:
    seq_idx, nodes, depths = (np.concatenate([getattr(p, n) for p in parts]) for n in ("seq_idx", "nodes", "depths"))
    return Layout(seq_idx, nodes, depths, None, parts[0].cu_seqlens_q, 0)


def split(values: Ints, cu: Ints) -> list[list[int]]:
    """Lists per sequence."""
    flat = values.tolist()
    return [flat[a:b] for a, b in pairwise(cu.tolist())]
