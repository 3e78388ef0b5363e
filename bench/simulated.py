"""A world without models: text whose difficulty is dialled, and a clock that goes by a cost table.

A draft token at a position of a text is accepted or not by a uniform number of that position and draw rank, so that all
controllers are given the same text, and what one of them drafts changes nothing of what another finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from lychee.runtime.controller import Controller, Fixed
from lychee.runtime.cost_table import CostTable, Floats
from lychee.runtime.planner import Table, plan, planned
from lychee.runtime.shape_buckets import ShapeBuckets, shape_buckets
from lychee.runtime.tree import ProposedTree, TreeShape

MAX_DEPTH, NODE_BUDGET, RANKS = 16, 32, 4
NATIVE = TreeShape.chain(0)


@dataclass(frozen=True)
class Regime:
    """How a draft does on a kind of text.

    rates: of each draw rank, how often its token is accepted where its earlier siblings were rejected.
    by_depth: what each level further down multiplies them by.
    """

    rates: tuple[float, ...]
    by_depth: float = 1.0

    @staticmethod
    def of(rate: float, by_depth: float = 1.0) -> Regime:
        """Later ranks are accepted less, as Sequoia (arXiv:2402.12374) measures it."""
        return Regime(tuple(rate / (rank + 1) for rank in range(RANKS)), by_depth)

    def accepts(self, depth: int, rank: int) -> float:
        """Of a child of a node at that depth."""
        return self.rates[rank] * self.by_depth**depth if rank < len(self.rates) else 0.0

    @lru_cache  # noqa: B019 - regimes are few
    def table(self) -> Table:
        """The true one, as the planner takes it."""
        rows = []
        for depth in range(MAX_DEPTH):
            left, row = 1.0, []
            for rank in range(RANKS):
                row.append(left * self.accepts(depth, rank))
                left *= 1 - self.accepts(depth, rank)
            rows.append(tuple(np.minimum.accumulate(row).tolist()))
        return tuple(rows)


@dataclass(frozen=True, eq=False)
class Text:
    """Stretches of tokens, each of a regime, and the uniform numbers [position, rank] that accept or reject."""

    regimes: tuple[Regime, ...]
    uniform: Floats

    @staticmethod
    def of(stretches: Sequence[tuple[Regime, int]], seed: int = 0) -> Text:
        """Each regime for so many tokens."""
        regimes = tuple(regime for regime, length in stretches for _ in range(length))
        return Text(regimes, np.random.default_rng(seed).random((len(regimes), RANKS)))

    def path(self, at: int, shape: TreeShape) -> list[int]:
        """Of a tree that is drafted at a position: the accepted nodes, root first. It ends with the text."""
        path, rank = [0], 0
        for node, parent in enumerate(shape.parents[1:], 1):
            if parent != path[-1]:
                continue
            depth, rank = len(path) - 1, shape.ranks[node]
            position = at + depth
            if position >= len(self.regimes) - 1:
                break
            if self.uniform[position, rank] < self.regimes[position].accepts(depth, rank):
                path.append(node)
        return path


@dataclass(frozen=True)
class Round:
    """began, milliseconds: of the clock. at, shapes, emitted: of each request, its position and what it was given."""

    began: float
    milliseconds: float
    at: tuple[int, ...]
    shapes: tuple[TreeShape, ...]
    emitted: tuple[int, ...]


@dataclass
class World:
    """What rounds cost; `jitter` is the standard deviation of the log of a round's time."""

    costs: CostTable
    jitter: float = 0.0
    seed: int = 0
    _draws: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._draws = np.random.default_rng(self.seed)

    def times(self, shapes: Sequence[TreeShape], lags: Sequence[int]) -> tuple[float, float]:
        """Milliseconds of drafting and of verification.

        lags: tokens that the draft has not seen of each request, which it runs before a round that drafts.
        """
        depth = max(shape.depth for shape in shapes)
        draft = 0.0
        if depth:
            rows = [sum(len(s.frontiers[at]) for s in shapes if s.depth > at) for at in range(depth)]
            draft = self.costs.drafting + sum(map(self.costs.draft, rows))
            behind = sum(lag for lag, shape in zip(lags, shapes, strict=True) if shape.depth and lag > 1)
            draft += self.costs.draft(1) * (1 + behind / 32) if behind else 0.0  # a chunk, which fills a pass at 32
        slow = float(np.exp(self.jitter * self._draws.standard_normal())) if self.jitter else 1.0
        return slow * draft, slow * self.costs.verify(sum(shape.num_nodes for shape in shapes))

    def play(self, controller: Controller, texts: Sequence[Text]) -> list[Round]:
        """All texts, together from their beginnings; each runs until it ends."""
        at, lag, clock = [0] * len(texts), [0] * len(texts), 0.0
        rounds = []
        while running := [i for i, text in enumerate(texts) if at[i] < len(text.regimes)]:
            shapes = controller.plan(running)
            trees = [ProposedTree(shape, (0,) * shape.num_nodes) for shape in shapes]
            draft, verify = self.times(shapes, [lag[i] for i in running])
            controller.timed(trees, draft, verify, self.costs.overhead)
            began, emitted = tuple(at[i] for i in running), []
            for i, tree in zip(running, trees, strict=True):
                path = texts[i].path(at[i], tree.shape)
                controller.observe(i, tree, path, len(path))
                at[i] += len(path)
                lag[i] = 0 if tree.depth else lag[i] + 1
                emitted.append(len(path))
                if at[i] >= len(texts[i].regimes):
                    controller.forget(i)
            spent = draft + verify + self.costs.overhead
            rounds.append(Round(clock, spent, began, tuple(shapes), tuple(emitted)))
            clock += spent
        return rounds


class Knowing:
    """The oracle: in each round the best shape for the regime that the text is in, all of whose chances it knows."""

    goes_on = None

    def __init__(self, costs: CostTable, text: Text) -> None:
        self.costs, self.text, self._at = costs, text, 0

    @property
    def shapes(self) -> Sequence[TreeShape]:
        return tuple({best_shape(regime, self.costs): None for regime in self.text.regimes})

    def plan(self, request_ids: Sequence[int]) -> list[TreeShape]:
        return [best_shape(self.text.regimes[self._at], self.costs)]

    def observe(self, request_id: int, tree: ProposedTree, path: Sequence[int], emitted: int) -> None:
        self._at += emitted

    def timed(self, trees: Sequence[ProposedTree], draft_ms: float, verify_ms: float, other_ms: float) -> None: ...

    def forget(self, request_id: int) -> None: ...


@lru_cache
def best_shape(regime: Regime, costs: CostTable) -> TreeShape:
    """Chains of all lengths and the best trees of the buckets' sizes, by expectation."""
    buckets = shape_buckets(NODE_BUDGET, MAX_DEPTH)
    every = tuple(range(1, MAX_DEPTH + 2))
    close = ShapeBuckets(tuple(sorted({*every, *buckets.rows})), (0, *every[:-1]), buckets.widths)
    return plan(regime.table(), costs, close).shape


def rate(shape: TreeShape, regime: Regime, costs: CostTable) -> float:
    """Tokens per millisecond that are to be expected."""
    return planned(shape, regime.table(), costs).rate


def fixed(length: int) -> Fixed:
    return Fixed(TreeShape.chain(length))


def milliseconds(rounds: Sequence[Round]) -> float:
    return sum(one.milliseconds for one in rounds)
