"""A trial of drafting: while it runs, some rounds draft for nobody, so that neighbours show what drafts bring."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

DRAFTED, PLAIN = 28, 4  # rounds in a row
KEPT = 48  # pairs: what has become slow shows among them, however many were good before


@dataclass(frozen=True)
class Pair:
    """Tokens per second of a request that is drafted for: in a run of rounds, and in the plain ones right after it.

    at: seconds of the trial's clock at its end.
    """

    at: float
    drafted: float
    plain: float


@dataclass
class _Run:
    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of all requests: a round counts for each of them

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Trial:
    """Rounds with requests that may be drafted for, in turns: `drafted` as the controller plans, `plain` of nobody.

    Both kinds have the same requests beside the same others, so their rates differ by what drafting brings and costs,
    the longer verification included. Requests that are never drafted for wait for drafts in shared rounds as well: by
    what they see nobody could tell. `running` may be set, and `pairs` be read, from any thread.
    """

    drafted: int = DRAFTED
    plain: int = PLAIN
    clock: Callable[[], float] = time.perf_counter
    running: bool = False
    pairs: tuple[Pair, ...] = ()
    _with: _Run = field(default_factory=_Run)
    _without: _Run = field(default_factory=_Run)

    @property
    def drafts(self) -> bool:
        """Whether the next round may draft."""
        return not self.running or self._with.rounds < self.drafted

    def add(self, drafted: bool, requests: int, tokens: int, seconds: float) -> None:
        """A round, whether it might draft: requests that may be drafted for, what these emitted, and what it took."""
        if not self.running or not requests:
            return
        run = self._with if drafted else self._without
        run.rounds += 1
        run.tokens += tokens
        run.seconds += requests * seconds
        if self._without.rounds >= self.plain:
            pair = Pair(self.clock(), self._with.rate, self._without.rate)
            self._with, self._without = _Run(), _Run()
            if pair.drafted and pair.plain:
                self.pairs = (*self.pairs, pair)[-KEPT:]
