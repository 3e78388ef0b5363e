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
class RequestStats:
    """Progress of one sequence. Times are seconds of a monotonic clock. All counts are over emitted text.

    drafted, accepted: nodes of the trunk; with `nodes_` before it, of the whole tree. drafted_at, accepted_at: rounds
    that drafted to this depth, and whose accepted path reached it. The token that a prefill emits belongs to no round.
    """

    arrived: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    ended: float | None = None
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    nodes_drafted: int = 0
    nodes_accepted: int = 0
    emitted: int = 0
    emitted_in_rounds: int = 0
    prompt_tokens: int = 0
    drafted_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_LEN)
    accepted_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_LEN)

    def add_round(self, shape: TreeShape, path: Seq[int], emitted: int, ended: bool) -> None:
        """One round: its tree, the accepted path's nodes, root first, and how many tokens were emitted.

        Where the text `ended`, nodes deeper than what was emitted do not count.
        """
        depth, trunk, nodes = shape.depth, len(shape.trunk) - 1, shape.num_nodes - 1
        if ended:
            depth, trunk = min(depth, emitted), min(trunk, emitted)
            nodes = sum(1 for at in shape.depths if 0 < at <= emitted)
        reached = min(len(path) - 1, emitted)
        self.rounds += 1
        self.drafted += trunk
        self.accepted += min(shape.on_trunk(path), emitted)
        self.nodes_drafted += nodes
        self.nodes_accepted += reached
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
            "output_tokens": self.emitted,
            "ttft_s": self.ttft_s,
            "e2e_s": self.e2e_s,
            "rounds": self.rounds,
            "drafted": self.nodes_drafted,
            "accepted": self.nodes_accepted,
            "emitted": self.emitted,
        }


@dataclass
class Metrics:
    """What an engine did since it was made or reset: seconds by phase, and sums over the sequences it ended.

    native_rounds: sequences' rounds that drafted nothing, by reason: `no_draft` (there is no draft model), `off` (the
    request asked for none), `planned` (the controller's choice), `limit` (no room below the token limit or in the
    draft's context), `blocks` (no free KV blocks). Counted as they happen, those of aborted sequences too.
    """

    draft_s: float = 0.0
    verify_s: float = 0.0
    step_s: float = 0.0
    preemptions: int = 0
    native_rounds: Counter[str] = field(default_factory=Counter)
    peak_memory_bytes: int = 0
    ended: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    nodes_drafted: int = 0
    nodes_accepted: int = 0
    emitted: int = 0
    emitted_in_rounds: int = 0
    drafted_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_LEN)
    accepted_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_LEN)

    def add(self, stats: RequestStats) -> None:
        """A sequence has ended."""
        self.ended += 1
        self.rounds += stats.rounds
        self.drafted += stats.drafted
        self.accepted += stats.accepted
        self.nodes_drafted += stats.nodes_drafted
        self.nodes_accepted += stats.nodes_accepted
        self.emitted += stats.emitted
        self.emitted_in_rounds += stats.emitted_in_rounds
        for depth in range(MAX_DRAFT_LEN):
            self.drafted_at[depth] += stats.drafted_at[depth]
            self.accepted_at[depth] += stats.accepted_at[depth]

    def totals(self) -> dict[str, Any]:
        """Totals over the ended sequences, under the names of the JSON report."""
        by_depth = zip(self.accepted_at, self.drafted_at, strict=True)
        return {
            "tokens_per_second": ratio(self.emitted, self.step_s),
            "mean_emitted_per_round": ratio(self.emitted_in_rounds, self.rounds),
            "acceptance_rate": ratio(self.accepted, self.drafted),
            "wasted_fraction": ratio(self.nodes_drafted - self.nodes_accepted, self.nodes_drafted),
            "acceptance_by_depth": [accepted / drafted for accepted, drafted in by_depth if drafted],
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
            "other_s": self.step_s - self.draft_s - self.verify_s,
            "peak_memory_bytes": self.peak_memory_bytes,
        }
