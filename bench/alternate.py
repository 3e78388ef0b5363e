"""Policies of one pair, alternated: every group of prompts is completed by every policy before the next group's turn.

A machine that is slow for a while is then slow for all of them, and what is compared ran within seconds.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.progress import track

from lychee import LLM, ParameterError, SamplingParams
from lychee.runtime.controller import Controller, Fixed, Window
from lychee.runtime.metrics import Metrics, RequestStats
from lychee.runtime.tree import TreeShape, parse_tree

MAX_LENGTH, THRESHOLD = 32, 0.4  # of a chain given by its length; of the window
WINDOW = 16
NATIVE, AUTO, ADAPTIVE = "native", "auto", "window"


@dataclass(frozen=True)
class Sample:
    """A group of prompts completed together by one policy. Times are seconds; `gaps` lie between a request's chunks."""

    policy: str
    run: int
    group: int
    seconds: float
    gaps: tuple[float, ...]
    requests: tuple[RequestStats, ...]

    @property
    def tokens(self) -> int:
        return sum(stats.emitted for stats in self.requests)


def controller_of(policy: str, auto: Controller) -> Controller | None:
    """`native` gives None, which decodes natively; `auto`, `window`, a chain's length, a tree's children by depth.

    Raises ParameterError.
    """
    if policy == NATIVE:
        return None
    if policy in (AUTO, ADAPTIVE):
        return auto if policy == AUTO else Window(WINDOW, THRESHOLD)
    if policy.isdecimal() and int(policy) <= MAX_LENGTH:
        return Fixed(TreeShape.chain(int(policy)))
    shape = parse_tree(policy, 64, MAX_LENGTH)
    if not isinstance(shape, TreeShape):
        raise ParameterError(f"policy is {policy!r}, must be native, auto, window, a length or a tree's children")
    return Fixed(shape)


def complete(llm: LLM, prompts: Sequence[Any], params: SamplingParams, native: bool) -> tuple[float, list[float], Any]:
    """Seconds, the gaps between chunks of a request, and the requests' statistics."""
    last: dict[int, float] = {}
    gaps: list[float] = []
    begin = time.perf_counter()
    stream = llm.stream(list(prompts), params, native=native)
    for chunk in stream:
        now = time.perf_counter()
        if chunk.request_id in last:
            gaps.append(now - last[chunk.request_id])
        last[chunk.request_id] = now
    seconds = time.perf_counter() - begin
    return seconds, gaps, tuple(c.stats for output in stream.outputs() for c in output.outputs)


def alternate(
    llm: LLM,
    groups: Sequence[Sequence[Any]],
    params: SamplingParams,
    policies: Sequence[str],
    runs: int,
    label: str = "measuring",
) -> list[Sample]:
    """Samples of `runs` runs, policies in random order within each group; one run before them is not counted.

    In it `auto` learns and programs are lowered. The engine's controller is `auto`'s, and is so again afterwards.
    """
    engine = llm.engine()
    auto = engine.controller
    controllers = {policy: controller_of(policy, auto) for policy in policies}
    order, draws, found = list(policies), random.Random(0), []
    for run in track(range(-1, runs), label, transient=True, disable=not sys.stderr.isatty()):
        for number, group in enumerate(groups):
            draws.shuffle(order)
            for policy in order:
                controller = controllers[policy]
                engine.controller = controller or auto
                seconds, gaps, stats = complete(llm, group, params, controller is None)
                if run >= 0:
                    found.append(Sample(policy, run, number, seconds, tuple(gaps), stats))
    engine.controller = auto
    return found


def speeds(samples: Iterable[Sample]) -> list[float]:
    """Tokens per second of each run, over the samples given."""
    seconds: dict[int, float] = {}
    tokens: dict[int, int] = {}
    for sample in samples:
        seconds[sample.run] = seconds.get(sample.run, 0.0) + sample.seconds
        tokens[sample.run] = tokens.get(sample.run, 0) + sample.tokens
    return [tokens[run] / seconds[run] for run in sorted(seconds)]


def totals(samples: Iterable[Sample]) -> dict[str, Any]:
    """What the metrics say of the samples' requests."""
    metrics = Metrics()
    for stats in (stats for sample in samples for stats in sample.requests):
        metrics.add(stats)
    return metrics.totals()


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """The median over runs of one speed as a multiple of another, and the ends of its bootstrap interval of 95 %."""
    ratios, draws = np.divide(ours, theirs), np.random.default_rng(0)
    medians = np.median(draws.choice(ratios, (2000, len(ratios))), 1)
    return float(np.median(ratios)), *map(float, np.quantile(medians, [0.025, 0.975]))
