"""Tree shapes: which nodes a round drafts, before their tokens are known."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache


@dataclass(frozen=True)
class TreeShape:
    """A static tree: parents[i] < i, parents[0] = -1. Node 0 is the root, the last committed token.

    One node is plain decoding; a chain of k drafts k tokens after the root.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents or self.parents[0] != -1 or any(not 0 <= p < i for i, p in enumerate(self.parents) if i):
            raise ValueError(f"parents is {self.parents}, must start with -1 and name earlier nodes")

    @staticmethod
    @lru_cache
    def chain(length: int) -> TreeShape:
        return TreeShape(tuple(range(-1, length)))

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return tuple(depths)

    @property
    def depth(self) -> int:
        return max(self.depths)

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


@dataclass(frozen=True)
class ProposedTree:
    """A shape with its drafted tokens; tokens[0] is the root's."""

    shape: TreeShape
    tokens: tuple[int, ...]
