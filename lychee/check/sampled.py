"""The proof of distribution: tokens sampled by rejection against native decoding's exact probabilities."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from ..runtime.sampling_params import SamplingParams
from .evidence import Evidence, evidence
from .samples import draw, num_requests, starts
from .subject import Subject, Tokens

SIGNIFICANCE = 1e-3
"""The probability that a lossless pair fails: of p-values, which are uniform then, so many lie below it."""


@dataclass(frozen=True)
class Sampled:
    """What `num_samples` samples of each of `num_prompts` prompts say."""

    num_prompts: int
    num_samples: int
    evidence: Evidence

    @property
    def p_value(self) -> float:
        return self.evidence.p_value

    @property
    def passed(self) -> bool:
        return self.p_value >= SIGNIFICANCE


@dataclass(frozen=True)
class SampleProof:
    """Where samples start, and how many there are of each. `params.seed` is the first of consecutive seeds."""

    subject: Subject
    starts: tuple[Tokens, ...]
    params: SamplingParams
    num_samples: int

    @staticmethod
    def of(subject: Subject, prompts: Seq[Tokens], params: SamplingParams, num_samples: int) -> SampleProof:
        return SampleProof(subject, tuple(starts(subject, prompts)), params, num_samples)

    def run(self, on_prompt: Callable[[], object]) -> Sampled:
        """All prompts."""
        found = Evidence()
        for number in range(len(self.starts)):
            found += self._evidence(number)
            on_prompt()
        return Sampled(len(self.starts), self.num_samples, found)

    def catch(self) -> Sampled:
        """Prompts until what they say suffices, each look having its share of the significance."""
        found = Evidence()
        for number in range(len(self.starts)):
            found += self._evidence(number)
            if found.p_value < SIGNIFICANCE / len(self.starts):
                return Sampled(number + 1, self.num_samples, found)
        return Sampled(len(self.starts), self.num_samples, found)

    def _evidence(self, number: int) -> Evidence:
        """Of one prompt. Seeds of prompts differ: with one seed, those of one length would have the same noise."""
        assert self.params.seed is not None
        seed = self.params.seed + number * num_requests(self.num_samples)
        params = replace(self.params, seed=seed)
        samples = draw(self.subject, self.starts[number], params, self.num_samples)
        (seq,) = self.subject.sequences(self.starts[number], params, "coupled")
        return evidence(self.subject.target, self.subject.draft, seq, samples)
