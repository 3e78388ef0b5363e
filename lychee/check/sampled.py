"""The proof of distribution: tokens sampled by rejection or traversal against native decoding's exact probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from ..runtime.sampling_params import SamplingParams
from .evidence import Evidence, evidence
from .samples import PER_REQUEST, draw, starts
from .subject import Subject, Tokens

SIGNIFICANCE = 1e-3
"""The probability that a lossless pair fails: of p-values, which are uniform then, so many lie below it."""


@dataclass(frozen=True)
class Sampled:
    """What `num_samples` samples say, of all of `num_prompts` prompts together."""

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

    def run(self, on_request: Callable[[], object]) -> Sampled:
        """All samples."""
        found = Evidence()
        for prompt, params in self._requests():
            found += self._evidence(prompt, params)
            on_request()
        return Sampled(len(self.starts), self.num_samples * len(self.starts), found)

    def catch(self) -> Sampled:
        """Samples until what they say suffices, each look having its share of the significance."""
        found, prompts, drawn = Evidence(), set[Tokens](), 0
        share = SIGNIFICANCE / num_requests(len(self.starts), self.num_samples)
        for prompt, params in self._requests():
            found += self._evidence(prompt, params)
            prompts.add(prompt)
            drawn += params.n
            if found.p_value < share:
                break
        return Sampled(len(prompts), drawn, found)

    def _requests(self) -> Iterator[tuple[Tokens, SamplingParams]]:
        """Some of the samples of each prompt, then more of each, no two with one seed: the same would be the noise."""
        assert self.params.seed is not None
        seed = self.params.seed
        for begin in range(0, self.num_samples, PER_REQUEST):
            for prompt in self.starts:
                yield prompt, replace(self.params, n=min(PER_REQUEST, self.num_samples - begin), seed=seed)
                seed += 1

    def _evidence(self, prompt: Tokens, params: SamplingParams) -> Evidence:
        samples = draw(self.subject, prompt, params)
        (seq,) = self.subject.sequences(prompt, replace(params, n=1), "coupled")
        return evidence(self.subject.target, self.subject.draft, seq, samples)


def num_requests(num_prompts: int, num_samples: int) -> int:
    return num_prompts * -(-num_samples // PER_REQUEST)
