"""What the samples say of each side: its speed, and where its tokens part from others'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from . import REFERENCE, Side
from .client import Client
from .measure import Sample

Texts = Mapping[int, Sequence[int]]  # tokens by prompt


@dataclass(frozen=True)
class Parting:
    """`at`: tokens in common. `margin`: the reference's logit of its own token less that of the side's."""

    prompt: int
    at: int
    margin: float | None


@dataclass(frozen=True)
class Summary:
    """Medians over prompts and rounds; rates are tokens per second.

    `rate`: of the whole call. `decode_rate`: after the first token. `per_pass`: tokens per pass of the target.
    `partings`: from the reference; None where there is none. `as_plain`: the share of prompts with the tokens of the
    side that it must equal. `repeats`: every round gave the same tokens.
    """

    rate: float
    decode_rate: float | None
    first_ms: float | None
    per_pass: float | None
    identical: float | None
    partings: list[Parting] | None
    as_plain: float | None
    repeats: bool


def parting(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Number of tokens before the first that differs; None where all are equal."""
    if list(ours) == list(theirs):
        return None
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def share_equal(ours: Texts, theirs: Texts) -> float:
    return sum(list(ours[i]) == list(theirs[i]) for i in ours) / len(ours)


def partings(ours: Texts, reference: Texts, prompts: Sequence[list[int]], client: Client) -> list[Parting]:
    """`client` is of the reference, which is asked for its logits."""
    found = []
    for i, tokens in ours.items():
        at = parting(tokens, reference[i])
        if at is None:
            continue
        margin = None
        if at < min(len(tokens), len(reference[i])):
            before = [*prompts[i], *tokens[:at]]
            theirs, own = client.logits_of(before, [reference[i][at], tokens[at]])
            margin = theirs - own
        found.append(Parting(i, at, margin))
    return found


def summaries(
    sides: Mapping[str, Side], clients: Mapping[str, Client], samples: Sequence[Sample], prompts: Sequence[list[int]]
) -> dict[str, Summary]:
    by_side = {name: [s for s in samples if s.side == name] for name in clients}
    texts: dict[str, Texts] = {
        name: {s.prompt: s.made.tokens for s in mine if s.round == 0} for name, mine in by_side.items()
    }
    found = {}
    for name, mine in by_side.items():
        made = [s.made for s in mine]
        apart = None
        if REFERENCE in clients:
            apart = partings(texts[name], texts[REFERENCE], prompts, clients[REFERENCE])
        plain = sides[name].plain
        found[name] = Summary(
            rate=median(len(m.tokens) / m.seconds for m in made),
            decode_rate=_median([(len(m.tokens) - 1) / (m.seconds - m.first) for m in made if m.first is not None]),
            first_ms=_median([1e3 * m.first for m in made if m.first is not None]),
            per_pass=_median([len(m.tokens) / m.passes for m in made if m.passes is not None]),
            identical=None if apart is None else 1 - len(apart) / len(texts[name]),
            partings=apart,
            as_plain=share_equal(texts[name], texts[plain]) if plain in texts else None,
            repeats=all(list(texts[name][s.prompt]) == s.made.tokens for s in mine),
        )
    return found


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
