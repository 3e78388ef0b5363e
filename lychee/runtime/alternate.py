"""Policies of one pair, alternated: every group of prompts is completed by every policy before the next group's turn.

A machine that is slow for a while is then slow for all of them, and what is compared ran within seconds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from .config import SpeculativeConfig
from .controller import Controller, make_controller
from .llm import LLM
from .metrics import Metrics, RequestStats
from .planned import Planned
from .sampling_params import SamplingParams

Sampling = SamplingParams | Sequence[SamplingParams]
"""For all prompts of a group, or for each."""

WINDOW = 16  # most tokens that `window` drafts
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


def fields_of(policy: str) -> dict[str, Any]:
    """Of SpeculativeConfig: `auto`, `window`, a chain's length, or a tree's children by depth."""
    if policy == ADAPTIVE:
        return {"tree": "chain", "max_draft_len": WINDOW}
    return {"num_speculative_tokens": int(policy)} if policy.isdecimal() else {"tree": policy}


def controller_of(policy: str, auto: Controller) -> Controller | None:
    """`native` gives None, which decodes natively, and `auto` the engine's own. Raises ParameterError."""
    if policy == NATIVE:
        return None
    return auto if policy == AUTO else make_controller(SpeculativeConfig(**fields_of(policy)))


def complete(llm: LLM, prompts: Sequence[Any], params: Sampling, native: bool) -> tuple[float, list[float], Any]:
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
    params: SamplingParams | Sequence[Sequence[SamplingParams]],
    policies: Sequence[str],
    runs: int,
    label: str = "measuring",
    first: int = -1,
) -> list[Sample]:
    """Samples of `runs` runs, policies in random order within each group; runs are numbered, and below 0 do not count.

    In such a one `auto` learns and programs are lowered. The engine's controller is `auto`'s, and is so again
    afterwards. params: for all prompts, or for each prompt of each group.
    """
    engine = llm.engine()
    auto = engine.controller
    controllers = {policy: controller_of(policy, auto) for policy in policies}
    order, draws, found = list(policies), random.Random(0), []
    turns = [(run, number) for run in range(first, runs) for number in range(len(groups))]
    console = Console(stderr=True)
    for run, number in track(turns, label, console=console, transient=True, disable=not console.is_terminal):
        draws.shuffle(order)
        group = groups[number]
        sampling = params if isinstance(params, SamplingParams) else params[number]
        for policy in order:
            controller = controllers[policy]
            engine.controller = controller or auto
            seconds, gaps, stats = complete(llm, group, sampling, controller is None)
            if run >= 0:
                found.append(Sample(policy, run, number, seconds, tuple(gaps), stats))
    engine.controller = auto
    return found


def draft_share(llm: LLM) -> float | None:
    """Time of a pass of the draft over that of the target, one row each; None where nothing is planned by costs."""
    controller = llm.engine().controller
    return controller.costs.draft(1) / controller.costs.verify(1) if isinstance(controller, Planned) else None


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
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(np.median(ratios)), float(low), float(high)
