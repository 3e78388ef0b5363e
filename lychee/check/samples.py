"""Samples of speculative decoding, and where in its rounds each token was drawn."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from enum import Enum

from ..runtime.checks import ParameterError
from ..runtime.sampling_params import SamplingParams
from .subject import Subject, Tokens

LENGTH = 6  # tokens kept of each sample: the prefill's, then those of about two rounds
PER_REQUEST = 256  # samples that run together and share a prompt's blocks


class Place(Enum):
    """Where a token was drawn; the last two are the first tokens of rounds after the first."""

    PREFILL = 0
    FIRST_ROUND = 1
    INSIDE = 2
    AFTER_REFUSAL = 3  # the round before accepted nothing, and so emitted one token
    AFTER_ACCEPTANCE = 4


@dataclass(frozen=True)
class Sample:
    """The first tokens of a completion."""

    tokens: Tokens
    places: tuple[Place, ...]


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
        longest = max(map(len, prompts))
        raise ParameterError(f"prompts have up to {longest} tokens, must leave room for {spare} in both models")
    return found


def draw(subject: Subject, prompt: Tokens, params: SamplingParams, num_samples: int) -> list[Sample]:
    """Samples of speculative decoding. `params.seed` is that of the first PER_REQUEST; those after have the next."""
    assert params.seed is not None
    samples: list[Sample] = []
    for seed in range(params.seed, params.seed + num_requests(num_samples)):
        n = min(PER_REQUEST, num_samples - len(samples))
        samples += _of_request(subject, prompt, replace(params, n=n, seed=seed))
    return samples


def num_requests(num_samples: int) -> int:
    return -(-num_samples // PER_REQUEST)


def _max_tokens(subject: Subject) -> int:
    """So many that no round is cut before a sample has all its tokens, or while others wait to share its blocks."""
    return LENGTH + 2 * (1 + max(shape.depth for shape in subject.engine.shapes))


def _of_request(subject: Subject, prompt: Tokens, params: SamplingParams) -> list[Sample]:
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
    return [Sample(tuple(s.emitted[:LENGTH]), places(n)[:LENGTH]) for s, n in zip(seqs, emitted, strict=True)]


def places(emitted: Seq[int]) -> tuple[Place, ...]:
    """Of each token, where the prefill and then each round emitted so many."""
    found: list[Place] = []
    for step, count in enumerate(emitted):
        place = Place.AFTER_REFUSAL if step and emitted[step - 1] == 1 else Place.AFTER_ACCEPTANCE
        if step < 2:
            place = (Place.PREFILL, Place.FIRST_ROUND)[step]
        found += [place] + [Place.INSIDE] * (count - 1)
    return tuple(found)
