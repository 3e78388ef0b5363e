"""How long each call of a lowered program takes when the program runs: on the CPU, one replay of its launches each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from lychee.kernels.kernel import Table

from .lower import Lowered


@dataclass(frozen=True)
class Profile:
    """Median seconds: of every call, run in the program's order, and of the program replayed as one."""

    calls: tuple[float, ...]
    replay: float


def profile(lowered: Lowered, budget: float, flushed_bytes: int) -> Profile:
    """Time passes over the program for `budget` seconds, at least 3.

    Before each pass other memory of `flushed_bytes` is read, more than the caches hold. A pass reads a weight once, so
    all of them come from memory, as those of a large model always do; what one call leaves for the next is in a cache
    as ever. What an empty replay takes is taken off each call.
    """
    other = torch.ones(flushed_bytes // 4)
    tables = [Table(step) for step in lowered.steps]
    nothing = Table(())
    lowered.replay()
    empty = median(_seconds(nothing.replay) for _ in range(100))
    calls: list[list[float]] = [[] for _ in tables]
    replays: list[float] = []
    ends = time.perf_counter() + budget
    while len(replays) < 3 or time.perf_counter() < ends:
        other.sum()
        for table, taken in zip(tables, calls, strict=True):
            taken.append(_seconds(table.replay))
        other.sum()
        replays.append(_seconds(lowered.replay))
    return Profile(tuple(max(median(taken) - empty, 0.0) for taken in calls), median(replays))


def fastest(call: Callable[[], object], runs: int = 10) -> float:
    """Seconds of the fastest of some runs, after one that is not counted."""
    call()
    return min(_seconds(call) for _ in range(runs))


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
