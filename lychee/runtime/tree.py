"""Tree shapes: which nodes a round drafts, before their tokens are known."""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Literal

from .checks import refuse


@dataclass(frozen=True)
class TreeShape:
    """A static tree: parents[i] < i, parents[0] = -1. Node 0 is the root, the last committed token.

    One node is plain decoding; a chain of k drafts k tokens after the root. Siblings are drawn in the order of their
    ids. Shapes made here and by the planner are trunk-first: the first-drawn path is 0, 1, 2, ..., so that accepting it
    moves no KV, and the rest follows by what it is expected to bring, so that a cut loses the least.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents or self.parents[0] != -1 or any(not 0 <= p < i for i, p in enumerate(self.parents) if i):
            raise ValueError(f"parents is {self.parents}, must start with -1 and name earlier nodes")

    @staticmethod
    @lru_cache
    def chain(length: int) -> TreeShape:
        return TreeShape(tuple(range(-1, length)))

    @staticmethod
    @lru_cache
    def widths(widths: tuple[int, ...]) -> TreeShape:
        """Every node of depth i has widths[i] children: SpecInfer's expansion configuration (arXiv:2305.09781).

        (4, 2, 2) drafts 4 + 8 + 16 nodes. Past the trunk, nodes come by how many earlier siblings their path passes
        over, then by depth: each sibling passed over costs more acceptance than a level does.
        """
        if any(width < 1 for width in widths):
            raise ValueError(f"widths is {widths}, must be of at least 1 each")
        paths: list[tuple[int, ...]] = [()]  # of each node the ranks on its path
        level = paths
        for width in widths:
            level = [(*path, rank) for path in level for rank in range(width)]
            paths = paths + level
        paths.sort(key=lambda path: (sum(path), len(path), path))
        at = {path: node for node, path in enumerate(paths)}
        return TreeShape(tuple(at[path[:-1]] if path else -1 for path in paths))

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return tuple(depths)

    @cached_property
    def depth(self) -> int:
        return max(self.depths)

    @cached_property
    def num_children(self) -> tuple[int, ...]:
        """Of each node."""
        counts = [0] * self.num_nodes
        for parent in self.parents[1:]:
            counts[parent] += 1
        return tuple(counts)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Of each node, how many siblings are drawn before it."""
        ranks, drawn = [0], [0] * self.num_nodes
        for parent in self.parents[1:]:
            ranks.append(drawn[parent])
            drawn[parent] += 1
        return tuple(ranks)

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """The nodes of each depth, ascending; the root's level is the first."""
        levels: list[list[int]] = [[] for _ in range(self.depth + 1)]
        for node, depth in enumerate(self.depths):
            levels[depth].append(node)
        return tuple(map(tuple, levels))

    @cached_property
    def frontiers(self) -> tuple[tuple[int, ...], ...]:
        """Of each level that drafts, the nodes that it draws from: those of its depth that have children."""
        return tuple(tuple(node for node in level if self.num_children[node]) for level in self.levels[:-1])

    @cached_property
    def width(self) -> int:
        """Most rows of a level that drafts after the root's; 1 where there is none."""
        return max(map(len, self.frontiers[1:]), default=1)

    @lru_cache(maxsize=1024)  # noqa: B019 - shapes are few
    def cut(self, max_depth: int, max_nodes: int) -> TreeShape:
        """The shape less its nodes below `max_depth`, then less all but the first `max_nodes`; the root stays."""
        if self.depth <= max_depth and self.num_nodes <= max_nodes:
            return self
        kept = [node for node, depth in enumerate(self.depths) if depth <= max(max_depth, 0)][: max(max_nodes, 1)]
        new = {old: i for i, old in enumerate(kept)}
        return TreeShape(tuple(new.get(self.parents[node], -1) for node in kept))

    @cached_property
    def trunk(self) -> tuple[int, ...]:
        """The first-drawn path, root first."""
        path = [0]
        for node, parent in enumerate(self.parents):
            if parent == path[-1]:
                path.append(node)
        return tuple(path)

    def on_trunk(self, path: Seq[int]) -> int:
        """How many nodes of a path, root first, are the trunk's, the root not counted."""
        return sum(1 for node, trunk in zip(path, self.trunk, strict=False) if node == trunk) - 1


@dataclass(frozen=True)
class ProposedTree:
    """A shape with its drafted tokens; tokens[0] is the root's, and -1 is that of a node which was not drawn.

    levels: how many were drafted, from the root's children on; None: all.
    """

    shape: TreeShape
    tokens: tuple[int, ...]
    levels: int | None = None

    @property
    def depth(self) -> int:
        """Of the deepest level that was drafted."""
        return self.shape.depth if self.levels is None else self.levels


def parse_tree(text: str, node_budget: int, max_depth: int) -> TreeShape | Literal["auto", "chain"]:
    """The option `tree`: a planned shape, a chain, or the numbers of `TreeShape.widths`, as in "4,2,2,1,1".

    node_budget: most nodes drafted, the root not counted. max_depth: most levels of them.
    Raises ParameterError.
    """
    if text == "auto":
        return "auto"
    if text == "chain":
        return "chain"
    if not isinstance(text, str) or not all(re.fullmatch(r" *0*[1-9][0-9]{0,8} *", part) for part in text.split(",")):
        raise refuse("tree", text, "auto, chain, or numbers of children by depth, of at least 1, such as 4,2,2,1,1")
    widths = tuple(int(part) for part in text.split(","))
    if len(widths) > max_depth:
        raise refuse("tree", text, f"at most {max_depth} numbers long")
    drafted = sum(accumulate(widths, lambda nodes, width: nodes * width))
    if drafted > node_budget:
        raise refuse("tree", text, f"a tree of at most {node_budget} drafted nodes, and this one has {drafted}")
    return TreeShape.widths(widths)
