"""Proofs of token equality: speculation gives native decoding's tokens, greedy and with a seed, in any batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice, zip_longest

import torch
from torch import Tensor

from ..kernels.philox import TARGET, exponentials, lane
from ..runtime.sampling_params import SamplingParams
from .subject import Subject, Tokens

NEAR_TIE_EPS = 32
"""On CUDA a prompt's prefill may be tiled otherwise in another batch; logits then move by roundings, some tens of the
dtype's epsilon. On the CPU, in every dtype, a row's bits are the same in every pass, and no difference is allowed."""


@dataclass(frozen=True)
class Difference:
    """Where a completion stops being native decoding's.

    prompt, position: from 1; position counts emitted tokens. together: in the batch of all prompts, not alone.
    native, speculative: token ids, None where the text has ended. margin: between the two tokens' logits in native
    decoding, in a sampled run with temperature, filters and the seed's noise; inf where speculation's had no
    probability.
    """

    prompt: int
    seed: int | None
    together: bool
    position: int
    native: int | None
    speculative: int | None
    margin: float | None
    allowed: float

    @property
    def near_tie(self) -> bool:
        return self.margin is not None and abs(self.margin) <= self.allowed != 0


@dataclass(frozen=True)
class Equality:
    """What came of comparing `num_tokens` tokens of native decoding with those of each speculative run."""

    num_tokens: int
    differences: tuple[Difference, ...]

    @property
    def passed(self) -> bool:
        return all(difference.near_tie for difference in self.differences)


@dataclass(frozen=True)
class TokenProof:
    """Prompts and parameters, each with native decoding's tokens, one prompt after the other."""

    subject: Subject
    prompts: tuple[Tokens, ...]
    params: tuple[SamplingParams, ...]
    expected: tuple[tuple[Tokens, ...], ...]

    @staticmethod
    def of(subject: Subject, prompts: tuple[Tokens, ...], params: tuple[SamplingParams, ...]) -> TokenProof:
        expected = (tuple(subject.complete(prompts, given, native=True)) for given in params)
        return TokenProof(subject, prompts, params, tuple(expected))

    def run(self) -> Equality:
        """With the prompts one by one, and as one batch."""
        return self._equality(chain(self._differences(False), self._differences(True)))

    def catch(self) -> Equality:
        """As one batch, up to the first difference."""
        return self._equality(islice(self._differences(True), 1))

    def _equality(self, differences: Iterable[Difference]) -> Equality:
        return Equality(sum(len(tokens) for some in self.expected for tokens in some), tuple(differences))

    def _differences(self, together: bool) -> Iterator[Difference]:
        for given, expected in zip(self.params, self.expected, strict=True):
            outputs = self.subject.complete(self.prompts, given, together=together)
            for number, (native, speculative) in enumerate(zip(expected, outputs, strict=True)):
                if native != speculative:
                    yield self._difference(number, given, together, native, speculative)

    def _difference(
        self, number: int, params: SamplingParams, together: bool, native: Tokens, speculative: Tokens
    ) -> Difference:
        at = next(i for i, (a, b) in enumerate(zip_longest(native, speculative)) if a != b)
        right = native[at] if at < len(native) else None
        wrong = speculative[at] if at < len(speculative) else None
        margin = None
        if right is not None and wrong is not None:
            scores = self._scores(number, params, native[:at])
            margin = float(scores[right] - scores[wrong])
        target, allowed = self.subject.llm.target, 0.0
        if self.subject.llm.device.type != "cpu":
            allowed = NEAR_TIE_EPS * torch.finfo(target.weights.dtype).eps
        return Difference(number + 1, params.seed, together, at + 1, right, wrong, margin, allowed)

    def _scores(self, number: int, params: SamplingParams, path: Tokens) -> Tensor:
        """[vocab]: what native decoding takes the largest of after the prompt and `path`."""
        (seq,) = self.subject.sequences(self.prompts[number], params, "coupled")
        *_, log_probs = self.subject.target.log_probs(seq, [path])
        if params.greedy:
            return log_probs[0]
        position, zero = torch.tensor([seq.num_prompt + len(path)]), torch.tensor([0])
        noise = exponentials(torch.tensor([seq.seed]), position, zero, zero + lane(TARGET, 0, 0), log_probs.shape[1])
        return (log_probs - noise.log())[0]
