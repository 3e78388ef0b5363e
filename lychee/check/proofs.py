"""All proofs and controls of a pair, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from ..runtime.sampling_params import SamplingParams
from .controls import OF_SAMPLES, UNVERIFIED, Control, broken
from .sampled import SIGNIFICANCE, Sampled, SampleProof, num_requests
from .subject import Subject, Tokens
from .tokens import Equality, TokenProof

T = TypeVar("T")
NUM_SEEDS = 3
NUM_STARTS = 6  # prompts that samples start from


@dataclass(frozen=True)
class Plan:
    """What is checked. sampling: of the coupled and the sampled proof, with the first seed; max_tokens: per prompt."""

    prompts: tuple[Tokens, ...]
    sampling: SamplingParams
    num_samples: int

    @property
    def greedy(self) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=self.sampling.max_tokens)

    @property
    def seeded(self) -> tuple[SamplingParams, ...]:
        assert self.sampling.seed is not None
        seeds = range(self.sampling.seed, self.sampling.seed + NUM_SEEDS)
        return tuple(replace(self.sampling, seed=seed) for seed in seeds)

    @property
    def sampled(self) -> tuple[Tokens, ...]:
        """Some of the prompts, from all of the list."""
        return self.prompts[:: -(-len(self.prompts) // NUM_STARTS)]


def num_seeds(num_prompts: int, num_samples: int) -> int:
    """How many consecutive seeds a check uses, at most."""
    return max(NUM_SEEDS, num_requests(min(NUM_STARTS, num_prompts), num_samples))


@dataclass(frozen=True)
class Tried:
    """A control, the proof that was to catch it, and what that found."""

    control: Control
    proof: str
    found: Equality | Sampled

    @property
    def caught(self) -> bool:
        if isinstance(self.found, Equality):
            return not self.found.passed
        return self.found.p_value < SIGNIFICANCE


@dataclass(frozen=True)
class Drafting:
    """What a proof's sound runs drafted: tokens on first-drawn paths, and how many of them were accepted."""

    drafted: int
    accepted: int


@dataclass(frozen=True)
class Results:
    """drafting: by the proof's name."""

    greedy: Equality
    coupled: Equality
    sampled: Sampled
    controls: tuple[Tried, ...]
    drafting: dict[str, Drafting]

    @property
    def lossless(self) -> bool:
        return self.greedy.passed and self.coupled.passed and self.sampled.passed

    @property
    def powerful(self) -> bool:
        return all(tried.caught for tried in self.controls)


def num_steps(plan: Plan) -> int:
    """How often `prove` calls `on_step`, at most: prompts without room for samples have no steps."""
    return 2 + num_requests(len(plan.sampled), plan.num_samples) + 2 + len(OF_SAMPLES)


def prove(subject: Subject, plan: Plan, on_step: Callable[[], object]) -> Results:
    drafting = {}

    def counted(name: str, run: Callable[[], T]) -> T:
        subject.llm.reset_metrics()
        found, metrics = run(), subject.llm.metrics()
        drafting[name] = Drafting(metrics.drafted, metrics.accepted)
        return found

    greedy = TokenProof.of(subject, plan.prompts, (plan.greedy,))
    coupled = TokenProof.of(subject, plan.prompts, plan.seeded)
    same_greedy = counted("greedy", greedy.run)
    on_step()
    same_coupled = counted("coupled", coupled.run)
    on_step()
    samples = SampleProof.of(subject, plan.sampled, plan.sampling, plan.num_samples)
    sampled = counted("sampled", lambda: samples.run(on_step))
    tried = []
    for name, proof in (("greedy", greedy), ("coupled", coupled)):
        with broken(subject.engine, UNVERIFIED):
            tried.append(Tried(UNVERIFIED, name, proof.catch()))
        on_step()
    for control in OF_SAMPLES:
        with broken(subject.engine, control):
            tried.append(Tried(control, "sampled", samples.catch()))
        on_step()
    return Results(same_greedy, same_coupled, sampled, tuple(tried), drafting)
