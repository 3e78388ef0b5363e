"""The shapes that rounds may have: few enough that all are lowered before requests come, and weighed in one product."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .cost_table import CostTable, Floats
from .planner import Table, plan
from .shape_buckets import ShapeBuckets
from .tree import TreeShape

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)  # of chains: the best of them is hardly worse than the best of all
FIRST_RATES = (0.3, 0.45, 0.6, 0.75, 0.85, 0.92, 0.97)  # acceptance of first children: a tree is planned for each
NEARLY = 0.96  # of the tokens per millisecond of the best
SHORT = 4  # nodes
NEVER = 1e-12


class Menu:
    """Shapes that draft, and what a round of each brings and costs.

    max_depth, max_children: the extent of the tables that `emitted` takes.
    """

    def __init__(self, shapes: Iterable[TreeShape], max_depth: int, max_children: int) -> None:
        self.shapes = tuple(dict.fromkeys(shapes))
        self._extent = max_depth, max_children
        self._rows = np.array([shape.num_nodes for shape in self.shapes])
        self._levels = np.array([shape.depth for shape in self.shapes])
        self._widths = np.array([shape.width for shape in self.shapes])
        self._first = np.cumsum([0, *self._rows[:-1]])
        self._steps = np.concatenate([_steps(shape, max_depth, max_children) for shape in self.shapes])

    @staticmethod
    def of(buckets: ShapeBuckets, costs: CostTable, max_children: int) -> Menu:
        """Chains, and trees of the buckets' sizes, that are nearly the best for some draft, be it a bad or a good one.

        The shortest chains are there whatever they bring, for requests whose end is near.
        """
        depth = buckets.depths[-1]
        tables = [typical(rate, depth, max_children) for rate in FIRST_RATES]
        trees = [plan(table, costs, buckets).shape for table in tables]
        chains = [TreeShape.chain(length) for length in sorted({*LENGTHS, depth}) if length <= depth]
        menu = Menu([*chains, *(tree for tree in trees if tree.depth)], depth, max_children)
        rates = np.array([menu.emitted(table) for table in tables]) / menu.milliseconds(costs, 1)[1]
        good = (rates >= NEARLY * rates.max(1, keepdims=True)).any(0)
        kept = [shape for shape, is_good in zip(menu.shapes, good, strict=True) if is_good or shape.num_nodes <= SHORT]
        return Menu(kept, depth, max_children)

    def with_shape(self, shape: TreeShape) -> Menu:
        return Menu([*self.shapes, shape], *self._extent)

    def emitted(self, accept: Floats | Table) -> Floats:
        """[..., shapes]: tokens that a round of each is to emit, by `accept` [..., depth, rank] as the planner's."""
        chances = np.log(np.maximum(accept, NEVER))
        reach = np.exp(chances.reshape(*chances.shape[:-2], -1) @ self._steps.T)
        return np.asarray(np.add.reduceat(reach, self._first, -1))

    def milliseconds(self, costs: CostTable, num_seqs: int) -> Floats:
        """[drafting, shapes]: of a round of `num_seqs` sequences, of which 0 to num_seqs draft, all that shape."""
        drafting = np.arange(num_seqs + 1)[:, None]
        verify = costs.verify.of(num_seqs + drafting * (self._rows - 1))
        first, others = costs.draft.of(np.maximum(drafting, 1)), costs.draft.of(np.maximum(drafting, 1) * self._widths)
        draft = costs.drafting + first + (self._levels - 1) * others
        return np.asarray(costs.overhead + verify + np.where(drafting > 0, draft, 0.0))


def typical(rate: float, depth: int, max_children: int) -> Table:
    """A table of a draft whose first children are accepted at this rate, later ones as Sequoia measures it."""
    chances, left = [], 1.0
    for rank in range(max_children):
        chances.append(left * rate / (rank + 1))
        left *= 1 - rate / (rank + 1)
    return (tuple(chances),) * depth


def _steps(shape: TreeShape, max_depth: int, max_children: int) -> Floats:
    """[nodes, max_depth * max_children]: how often a node's path takes each entry of a table."""
    steps = np.zeros((shape.num_nodes, max_depth * max_children))
    for node, parent in enumerate(shape.parents[1:], 1):
        steps[node] = steps[parent]
        steps[node, (shape.depths[node] - 1) * max_children + shape.ranks[node]] += 1
    return steps
