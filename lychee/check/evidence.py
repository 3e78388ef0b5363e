"""What samples say about speculation: tests of their tokens against exact probabilities."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from ..runtime.sequence import Sequence
from .chi_square import IMPOSSIBLE, LEAST_EXPECTED, ChiSquare, Counts, pearson
from .exact import Reader
from .samples import Place, Sample
from .subject import Tokens

RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Tokens are sorted into cells by target probability / draft probability, with these borders."""
LEAST_GROUP = int(4 * LEAST_EXPECTED)  # samples of one history that are tested token by token
PATHS = 64  # histories that the models read in one pass


def _none() -> Counts:
    return Counts.none(len(RATIOS) + 1)


@dataclass(frozen=True)
class Evidence:
    """Of one prompt's samples, or of several prompts', which add.

    tokens: each token by itself, where many samples share a history.
    drafted: all tokens of rounds by RATIOS, over all histories. What is wrong with acceptance, or with the token drawn
        after a rejection, favours tokens that the draft overrates or those that it underrates.
    after_refusal, after_acceptance: the same for first tokens of rounds, by what the round before did. Noise that is
        used again makes a round repeat the one before.
    """

    tokens: ChiSquare = field(default_factory=ChiSquare)
    drafted: Counts = field(default_factory=_none)
    after_refusal: Counts = field(default_factory=_none)
    after_acceptance: Counts = field(default_factory=_none)

    def __add__(self, other: Evidence) -> Evidence:
        return Evidence(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def tests(self) -> dict[str, ChiSquare]:
        rounds = self.drafted, self.after_refusal, self.after_acceptance
        return dict(zip([f.name for f in fields(self)], [self.tokens, *(c.test() for c in rounds)], strict=True))

    @property
    def p_value(self) -> float:
        """Of all tests together: the smallest, times their number (Bonferroni)."""
        tests = self.tests.values()
        return min(1.0, len(tests) * min(test.p_value for test in tests))


def evidence(target: Reader, draft: Reader, seq: Sequence, samples: Seq[Sample]) -> Evidence:
    """The samples of `seq`'s prompt against the target's probabilities, which the test knows exactly.

    Lossless speculation gives each token the target's probability given all that came before: the tokens, and how
    earlier rounds and this one went up to here. So samples of one history may be told apart by Place.
    """
    following: defaultdict[Tokens, list[tuple[int, Place]]] = defaultdict(list)
    for sample in samples:
        for i, drawn in enumerate(zip(sample.tokens, sample.places, strict=True)):
            following[sample.tokens[:i]].append(drawn)
    found = Evidence()
    for path, probs, cells in _laws(target, draft, seq, list(following)):
        for place in Place:
            tokens = [token for token, where in following[path] if where is place]
            if tokens:
                found += _of_group(place, torch.tensor(tokens), probs, cells)
    return found


def _laws(target: Reader, draft: Reader, seq: Sequence, paths: Seq[Tokens]) -> Iterator[tuple[Tokens, Tensor, Tensor]]:
    """Each path with the target's probabilities after it, and each token's cell of RATIOS; both [vocab]."""
    borders = torch.tensor(RATIOS).log()
    for start in range(0, len(paths), PATHS):
        some = paths[start : start + PATHS]
        of_target, of_draft = target.log_probs(seq, some), draft.log_probs(seq, some)
        for path, mine, its in zip(some, of_target, of_draft, strict=True):
            yield path, mine.double().softmax(-1), torch.bucketize(mine - its, borders)


def _of_group(place: Place, drawn: Tensor, probs: Tensor, cells: Tensor) -> Evidence:
    """Of the tokens `drawn` after one history; probs, cells: [vocab]."""
    if bool((probs[drawn] == 0).any()):
        return Evidence(IMPOSSIBLE)
    tokens = ChiSquare()
    if len(drawn) >= LEAST_GROUP:
        tokens = pearson(drawn.bincount(minlength=len(probs)), probs)
    if place is Place.PREFILL:
        return Evidence(tokens)
    law = torch.zeros(len(RATIOS) + 1, dtype=torch.float64).index_add(0, cells, probs)
    counts = Counts.of(cells[drawn].bincount(minlength=len(law)), law)
    refused, accepted = place is Place.AFTER_REFUSAL, place is Place.AFTER_ACCEPTANCE
    return Evidence(tokens, counts, counts if refused else _none(), counts if accepted else _none())
