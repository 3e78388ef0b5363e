"""Samples of speculative decoding, and where in its rounds each token was drawn."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from ..runtime.checks import ParameterError
from ..runtime.sampling_params import SamplingParams
from .subject import Subject, Tokens

LENGTH = 96
"""Tokens kept of each sample: the prefill's, then those of rounds. What tells of noise that is used again are pairs of
rounds of one sample, of which one twice as long has four times as many."""
PER_REQUEST = 64  # samples that run together and share a prompt's blocks


class Place(Enum):
    """Where a token was drawn; the last two are the first tokens of rounds after the first."""

    PREFILL = 0
    FIRST_ROUND = 1
    INSIDE = 2
    AFTER_REFUSAL = 3  # the round before accepted nothing, and so emitted one token
    AFTER_ACCEPTANCE = 4


@dataclass(frozen=True)
class Sample:
    """The first LENGTH tokens of a completion. steps: how many tokens the prefill and then each round emitted."""

    tokens: Tokens
    steps: tuple[int, ...]

    @cached_property
    def places(self) -> tuple[Place, ...]:
        found: list[Place] = []
        for step, count in enumerate(self.steps):
            place = Place.AFTER_REFUSAL if step and self.steps[step - 1] == 1 else Place.AFTER_ACCEPTANCE
            if step < 2:
                place = (Place.PREFILL, Place.FIRST_ROUND)[step]
            found += [place] + [Place.INSIDE] * (count - 1)
        return tuple(found[: len(self.tokens)])

    @cached_property
    def rounds(self) -> tuple[int, ...]:
        """Of each token, the number of its round; 0 is the prefill."""
        found = (number for number, count in enumerate(self.steps) for _ in range(count))
        return tuple(found)[: len(self.tokens)]

    @cached_property
    def candidates(self) -> tuple[frozenset[int], ...]:
        """Of each token, those that ended earlier rounds as deep in them as it lies in its own."""
        ends: dict[int, frozenset[int]] = {}
        found: list[frozenset[int]] = []
        for step, count in enumerate(self.steps):
            begin = len(found)
            found += [ends.get(depth, frozenset()) if step else frozenset() for depth in range(count)]
            if step and begin + count <= len(self.tokens):
                ends[count - 1] = ends.get(count - 1, frozenset()) | {self.tokens[begin + count - 1]}
        return tuple(found[: len(self.tokens)])


def starts(subject: Subject, prompts: Seq[Tokens]) -> list[Tokens]:
    """Where samples start: the prompts, each continued greedily by native decoding to one token past a KV block's end.

    Samples then share all blocks of their prompt, and each has one token to prefill. A prompt stays as it is where the
    models' contexts have no room for more, and is left out where they have none for samples.
    """
    size, spare = subject.native.kv.block_size, _max_tokens(subject)
    limit = min(subject.llm.max_model_len, subject.drafter.max_len) - spare
    found = []
    for prompt in prompts:
        missing = -(len(prompt) - 1) % size
        if missing and len(prompt) + missing <= limit:
            params = SamplingParams(max_tokens=missing, temperature=0.0, ignore_eos=True)
            found.append(prompt + subject.complete([prompt], params, native=True)[0])
        elif len(prompt) <= limit:
            found.append(prompt)
    if not found:
        shortest = min(map(len, prompts))
        raise ParameterError(
            f"prompts have {shortest} tokens or more; samples need prompts of at most {max(limit, 0)}, which leaves "
            f"room for {spare} more tokens in both models' contexts"
        )
    return found


def draw(subject: Subject, prompt: Tokens, params: SamplingParams) -> list[Sample]:
    """`params.n` samples of speculative decoding, which run together."""
    engine = subject.engine
    params = replace(params, max_tokens=_max_tokens(subject), ignore_eos=True)
    seqs = subject.sequences(prompt, params, subject.rejection)
    for seq in seqs:
        engine.add(seq)
    emitted: list[list[int]] = [[] for _ in seqs]
    while not engine.idle:
        for chunk in engine.step():
            emitted[chunk.sample_idx].append(len(chunk.token_ids))
        if not engine.scheduler.waiting:
            for seq in seqs:
                if seq.num_emitted >= LENGTH:
                    engine.abort(seq)
    return [Sample(tuple(seq.emitted[:LENGTH]), tuple(steps)) for seq, steps in zip(seqs, emitted, strict=True)]


def _max_tokens(subject: Subject) -> int:
    """So many that no round is cut before a sample has all its tokens, or while others wait to share its blocks."""
    return LENGTH + 2 * (1 + max(shape.depth for shape in subject.engine.shapes))
