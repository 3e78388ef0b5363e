"""Planning: the tree that emits the most tokens per millisecond, from acceptance rates and measured costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from .cost_table import CostTable
from .shape_buckets import ShapeBuckets
from .tree import TreeShape

Table = tuple[tuple[float, ...], ...]
Node = tuple[float, int, int]  # minus the probability that it is accepted, its number, its parent's: sorts best first


@dataclass(frozen=True)
class Plan:
    """A shape, and what a round with it is expected to emit, in tokens, and to take."""

    shape: TreeShape
    emitted: float
    milliseconds: float

    @property
    def rate(self) -> float:
        """Tokens per millisecond."""
        return self.emitted / self.milliseconds


@lru_cache(maxsize=256)
def plan(accept: Table, costs: CostTable, buckets: ShapeBuckets, num_seqs: int = 1) -> Plan:
    """The shape of the buckets' sizes that maximises emitted / milliseconds; a tie goes to the smaller one.

    accept: [depth][rank] is the probability that of an accepted node at that depth (0 is the root) the child of that
        draw rank is the accepted one; it does not depend on how many children are drawn, and must not rise with the
        rank. The table's extent limits depth and children.
    num_seqs: sequences that run together, all with trees of this size.

    A round emits 1 + the sum over nodes of the product of `accept` along their path. Sequoia (arXiv:2402.12374) finds
    the best tree of each size by dynamic programming over subtrees, which serves any table; where `accept` falls with
    the rank, the best are simply the nodes of largest products, since a parent and an earlier sibling never have less.
    Costs depend on rows, levels and frontier rows alone. For each depth and frontier width, then, each level expands
    its best nodes up to the width, the trunk is taken down to the depth, and the best others fill the rows: any tree of
    these sizes can be matched with this one, node by node, in which no node has less.
    """
    if any(not ranks or not 1 >= a >= b >= 0 for ranks in accept for a, b in pairwise((1.0, *ranks, 0.0))):
        raise ValueError(f"accept is {accept}, must have for each depth probabilities that do not rise with the rank")
    chosen: list[Node] = []
    emitted, milliseconds = 1.0, costs.milliseconds(1, 0, 0, num_seqs)
    known = _costs(costs, buckets, num_seqs)
    for width in buckets.widths:
        for depth, reached, trunk, others in _grown(accept, width, buckets.rows[-1]):
            if depth not in buckets.depths:
                continue
            sums = list(accumulate((-node[0] for node in others), initial=reached))
            for rows, cost in known[width, depth]:
                if rows <= depth + len(sums):
                    tokens = sums[rows - 1 - depth]
                    if tokens * milliseconds > emitted * cost:
                        emitted, milliseconds = tokens, cost
                        chosen = [*trunk, *others[: rows - 1 - depth]]
    return Plan(_shape(chosen), emitted, milliseconds)


def expected(shape: TreeShape, accept: Table) -> list[float]:
    """Of each node, the probability that it is accepted: the product of `accept` along its path."""
    reach = [1.0]
    for node, parent in enumerate(shape.parents[1:], 1):
        ranks = accept[min(shape.depths[node], len(accept)) - 1]
        rank = shape.ranks[node]
        reach.append(reach[parent] * (ranks[rank] if rank < len(ranks) else 0.0))
    return reach


@lru_cache(maxsize=256)
def planned(shape: TreeShape, accept: Table, costs: CostTable, num_seqs: int = 1) -> Plan:
    """What a given shape is expected to bring, as `plan` counts it."""
    milliseconds = costs.milliseconds(shape.num_nodes, shape.depth, shape.width, num_seqs)
    return Plan(shape, sum(expected(shape, accept)), milliseconds)


@lru_cache(maxsize=16)
def _costs(
    costs: CostTable, buckets: ShapeBuckets, num_seqs: int
) -> dict[tuple[int, int], tuple[tuple[int, float], ...]]:
    """By frontier width and depth: the numbers of rows that such a tree may have, and the milliseconds of a round."""
    return {
        (width, depth): tuple(
            (rows, costs.milliseconds(rows, depth, width, num_seqs)) for rows in buckets.rows if rows > depth
        )
        for width in buckets.widths
        for depth in buckets.depths
    }


def _grown(accept: Table, width: int, most: int) -> Iterator[tuple[int, float, list[Node], list[Node]]]:
    """For each depth: it, tokens emitted with the trunk alone, the trunk's nodes, and the `most` best others."""
    reached, made = 1.0, 0
    trunk: list[Node] = []
    others: list[Node] = []
    frontier: list[Node] = [(-1.0, 0, -1)]
    for depth, ranks in enumerate(accept, 1):
        level = []
        for probability, parent, _ in frontier:
            for rate in ranks:
                made += 1
                level.append((probability * rate, made, parent))
        level.sort()
        trunk.append(level[0])
        others = sorted(others + level[1:])[:most]
        reached -= level[0][0]
        frontier = level[:width]
        yield depth, reached, trunk, others


def _shape(nodes: list[Node]) -> TreeShape:
    at = {0: 0} | {number: i for i, (_, number, _) in enumerate(nodes, 1)}
    return TreeShape((-1, *(at[parent] for _, _, parent in nodes)))
