"""Metrics: one object that the command line, the report and the benches read. All counts are over emitted text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from .config import MAX_DRAFT_LEN
from .tree import TreeShape


def ratio(part: float, whole: float) -> float | None:
    """part / whole; None where there is no whole."""
    return part / whole if whole else None


@dataclass
class Counts:
    """What rounds did, over emitted text: where a text ends, nodes deeper than what was emitted do not count.

    rounds, rounds_native: passes of the target that follow the prefill, and those of them for which nothing was
    drafted. shapes: of the others, how many had each tree, as it was drafted.
    drafted, accepted: nodes. trunk_drafted, trunk_accepted: those on the path of first draws; of a chain, all.
    drafted_at, accepted_at: rounds that drafted to this depth, and whose accepted path reached it.
    emitted, emitted_in_rounds: tokens; the first, which the prefill emits, belongs to no round.
    """

    rounds: int = 0
    rounds_native: int = 0
    shapes: Counter[TreeShape] = field(default_factory=Counter)
    drafted: int = 0
    accepted: int = 0
    trunk_drafted: int = 0
    trunk_accepted: int = 0
    drafted_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_LEN)
    accepted_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_LEN)
    emitted: int = 0
    emitted_in_rounds: int = 0

    def report(self) -> dict[str, Any]:
        names = "rounds", "rounds_native", "drafted", "accepted", "trunk_drafted", "trunk_accepted", "emitted"
        return {name: getattr(self, name) for name in names}


@dataclass
class RequestStats(Counts):
    """Progress of one sequence, and what a completion's `stats` are; `report` gives them for JSON.

    arrived, first_token, ended: when it was queued, its first token came, and it ended, in seconds of
    `time.perf_counter`; None before. ttft_s, e2e_s: seconds from `arrived` to the other two.
    prompt_tokens, cached_tokens: of the prompt, and how many of them the prefix cache had.
    """

    arrived: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    ended: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def add_round(self, shape: TreeShape, path: Seq[int], emitted: int, ended: bool, levels: int | None = None) -> None:
        """One round: its tree, the accepted path's nodes, root first, tokens emitted, and whether the text ended.

        levels: of the tree that were drafted; None: all.
        """
        on_trunk = shape.on_trunk(path)
        if levels is not None and levels < shape.depth:
            shape = shape.cut(levels, shape.num_nodes)
        depth, trunk, nodes = shape.depth, len(shape.trunk) - 1, shape.num_nodes - 1
        if ended:
            depth, trunk = min(depth, emitted), min(trunk, emitted)
            nodes = sum(1 for at in shape.depths if 0 < at <= emitted)
        reached = min(len(path) - 1, emitted)
        self.rounds += 1
        if shape.depth:
            self.shapes[shape] += 1
        else:
            self.rounds_native += 1
        self.drafted += nodes
        self.accepted += reached
        self.trunk_drafted += trunk
        self.trunk_accepted += min(on_trunk, emitted)
        self.emitted += emitted
        self.emitted_in_rounds += emitted
        for at in range(depth):
            self.drafted_at[at] += 1
        for at in range(reached):
            self.accepted_at[at] += 1

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def e2e_s(self) -> float | None:
        return None if self.ended is None else self.ended - self.arrived

    def report(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.emitted,
            "ttft_s": self.ttft_s,
            "e2e_s": self.e2e_s,
            **super().report(),
        }


@dataclass
class Metrics(Counts):
    """What an engine did since it was made or reset: seconds by phase, and sums over the sequences it ended.

    native_rounds: sequences' rounds that drafted nothing, by reason: `no_draft` (there is no draft model), `off` (the
    request asked for none), `control` (a trial's round without drafts), `planned` (the controller's choice), `limit`
    (no room below the token limit or in the draft's context), `blocks` (no free KV blocks), `behind` (the draft has
    yet to read the prompt). Counted as they happen, those of aborted sequences too.
    prefix_cache_queries, prefix_cache_hits: tokens of sequences that began, or resumed after a preemption, and how many
    of them had KV already. Counted as they begin.
    """

    draft_s: float = 0.0
    verify_s: float = 0.0
    step_s: float = 0.0
    preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    native_rounds: Counter[str] = field(default_factory=Counter)
    peak_memory_bytes: int = 0
    ended: int = 0

    def add(self, stats: RequestStats) -> None:
        """A sequence has ended."""
        self.ended += 1
        self.shapes.update(stats.shapes)
        for name in (*Counts().report(), "emitted_in_rounds"):
            setattr(self, name, getattr(self, name) + getattr(stats, name))
        for depth in range(MAX_DRAFT_LEN):
            self.drafted_at[depth] += stats.drafted_at[depth]
            self.accepted_at[depth] += stats.accepted_at[depth]

    def totals(self) -> dict[str, Any]:
        """Totals over the ended sequences, under the names of the JSON report."""
        by_depth = zip(self.accepted_at, self.drafted_at, strict=True)
        return {
            "tokens_per_second": ratio(self.emitted, self.step_s),
            "mean_emitted_per_round": ratio(self.emitted_in_rounds, self.rounds),
            "acceptance_rate": ratio(self.trunk_accepted, self.trunk_drafted),
            "wasted_fraction": ratio(self.drafted - self.accepted, self.drafted),
            "acceptance_by_depth": [accepted / drafted for accepted, drafted in by_depth if drafted],
            **self.report(),
            "rounds_by_tree": [{"tree": tree_name(tree), "rounds": n} for tree, n in self.shapes.most_common()],
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
            "other_s": self.step_s - self.draft_s - self.verify_s,
            "prefix_cache_queries": self.prefix_cache_queries,
            "prefix_cache_hits": self.prefix_cache_hits,
            "peak_memory_bytes": self.peak_memory_bytes,
        }


def tree_name(shape: TreeShape) -> str:
    """`chain of 4`; or children by depth, as the option `tree` has them; or of all nodes, as in `3; 2,1,0; 1,0,0`."""
    levels = [[shape.num_children[node] for node in level] for level in shape.levels[:-1]]
    if all(children == [1] for children in levels):
        return f"chain of {shape.depth}"
    if all(min(children) == max(children) for children in levels):
        return ",".join(str(children[0]) for children in levels)
    return "; ".join(",".join(map(str, children)) for children in levels)
