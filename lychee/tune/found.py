"""What was measured: a scenario, drafts, and the rungs of each draft's ladder."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..runtime.alternate import ADAPTIVE, AUTO, NATIVE, WINDOW, Sample
from ..runtime.metrics import Metrics
from ..runtime.sequence import Mode

RESAMPLED = 2000
LONGEST = 16  # characters of a tree that are shown
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Gain:
    """Native end-to-end time over that of a rung, and its bootstrap interval of 95 %."""

    times: float
    low: float
    high: float

    @staticmethod
    def of(native: Seq[Sample], own: Seq[Sample]) -> Gain:
        """Of samples of the same groups in the same runs; groups, and runs within each, are what is resampled.

        What else runs on a machine only adds to a time, so a group's is the least of its runs', for a token.
        """
        tokens = {sample.group: sample.tokens for sample in native}
        ours, theirs = _by_group(own, tokens), _by_group(native, tokens)
        draws = np.random.default_rng(0)
        groups = draws.integers(len(ours), size=(RESAMPLED, len(ours), 1))
        runs = draws.integers(ours.shape[1], size=(RESAMPLED, *ours.shape))
        low, high = np.quantile(_ratio(theirs[groups, runs], ours[groups, runs]), [0.025, 0.975])
        return Gain(float(_ratio(theirs, ours)), float(low), float(high))


def _by_group(samples: Seq[Sample], tokens: Mapping[int, int]) -> Floats:
    """Seconds of each group in each run [groups, runs], as for so many `tokens` of the group."""
    found: dict[int, list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: (sample.group, sample.run)):
        found.setdefault(sample.group, []).append(sample)
    return np.array([[s.seconds * tokens[group] / s.tokens for s in runs] for group, runs in found.items()])


def _ratio(native: Floats, own: Floats) -> Floats:
    return np.asarray(native.min(-1).sum(-1) / own.min(-1).sum(-1))


@dataclass(frozen=True)
class Rung:
    """A policy. seconds: end to end, for all prompts once; of `few` it was tried on the first prompts alone.

    emitted: tokens per round. wasted: share of the drafted. memory: bytes of weights, activations and the KV in use.
    """

    policy: str
    gain: Gain
    seconds: float
    emitted: float | None
    wasted: float | None
    memory: int
    few: bool = False


@dataclass(frozen=True)
class Scenario:
    """How the prompts are completed natively, by which all else is measured.

    together: requests at a time. prompt_tokens, output_tokens: of a request, means. seconds: end to end, for all
    prompts once. prefill: the share of it until first tokens. memory: as of a rung. free: bytes beside the weights.
    """

    device: str
    together: int
    num_prompts: int
    prompt_tokens: float
    output_tokens: float
    seconds: float
    prefill: float
    temperature: float
    mode: Mode
    parameters: int
    memory: int
    free: int


@dataclass(frozen=True)
class Unfit:
    """Why a draft could not be tried."""

    topic: Literal["tokenizer", "memory"]
    why: str


@dataclass(frozen=True)
class Draft:
    """A draft model. cost: time of its pass over the target's. agreement: share of its tokens that the target kept,
    of those that it came to. prompts, native: how many the rungs had, and native decoding's seconds beside them.
    left_out: rungs that do not fit in memory, and why. confirmed: the best rung's gain, measured again.
    """

    name: str
    parameters: int
    unfit: Unfit | None = None
    cost: float | None = None
    agreement: float | None = None
    prompts: int = 0
    native: float = 0.0
    rungs: tuple[Rung, ...] = ()
    left_out: Mapping[str, str] | None = None
    confirmed: Gain | None = None

    @cached_property
    def best(self) -> Rung | None:
        return max(self.rungs, key=lambda rung: rung.gain.times, default=None)


def least_seconds(samples: Seq[Sample]) -> float:
    """Of all groups once, each in its fastest run."""
    return float(_by_group(samples, {sample.group: sample.tokens for sample in samples}).min(-1).sum())


def policy_name(policy: str) -> str:
    """As people read it."""
    if policy.isdecimal():
        return f"chain of {policy}"
    if policy in (AUTO, ADAPTIVE, NATIVE):
        return f"chain of up to {WINDOW}" if policy == ADAPTIVE else policy
    return f"tree {policy}" if len(policy) <= LONGEST else f"tree {policy[:3]}..., {policy.count(',') + 1} deep"


def agreement(samples: Seq[Sample]) -> float | None:
    """Of chains: tokens that were accepted, of those whose predecessors all were."""
    sums = Metrics()
    for stats in (stats for sample in samples for stats in sample.requests):
        sums.add(stats)
    reached = [sums.drafted_at[0], *sums.accepted_at[:-1]]
    looked_at = sum(map(min, reached, sums.drafted_at))
    return sum(sums.accepted_at) / looked_at if looked_at else None
