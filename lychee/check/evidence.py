"""What samples say about speculation: tests of their tokens against exact probabilities."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from ..runtime.sequence import Sequence
from .chi_square import IMPOSSIBLE, LEAST_EXPECTED, ChiSquare, Counts, Drift, pearson
from .exact import Reader
from .samples import Place, Sample
from .subject import Tokens

RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Tokens are sorted into cells by target probability / draft probability, with these borders."""
LEAST_GROUP = int(4 * LEAST_EXPECTED)  # samples of one history that are tested token by token
PATHS = 64  # samples that the models read in one pass


@dataclass(frozen=True)
class Evidence:
    """Of some samples of one prompt, or of several prompts', which add.

    tokens: each token by itself, where many samples share a history.
    drafted: all tokens of rounds by RATIOS, over all histories. What is wrong with acceptance, or with the token drawn
        after a rejection, favours tokens that the draft overrates or those that it underrates.
    alike: whether, in one sample, rounds that emit what the draft overrates are followed by more of that. Acceptance
        noise that is used again makes a round go as those before.
    repeated: tokens that ended an earlier round as deep in it. Noise of the token after a path, used again, draws the
        same.
    """

    tokens: ChiSquare = field(default_factory=ChiSquare)
    drafted: Counts = field(default_factory=lambda: Counts.none(len(RATIOS) + 1))
    alike: Drift = field(default_factory=Drift)
    repeated: Counts = field(default_factory=lambda: Counts.none(2))

    def __add__(self, other: Evidence) -> Evidence:
        return Evidence(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def tests(self) -> dict[str, ChiSquare]:
        others = {name: getattr(self, name).test() for name in ("drafted", "alike", "repeated")}
        return {"tokens": self.tokens, **others}

    @property
    def p_value(self) -> float:
        """Of all tests together: the smallest, times their number (Bonferroni)."""
        return self.p_value_of_more(1)

    def p_value_of_more(self, times: float) -> float:
        """About what it would be with so many times the samples."""
        tests = self.tests.values()
        return min(1.0, len(tests) * min((test if times == 1 else test.of_more(times)).p_value for test in tests))


def evidence(target: Reader, draft: Reader, seq: Sequence, samples: Seq[Sample]) -> Evidence:
    """The samples of `seq`'s prompt against the target's probabilities, which the test knows exactly.

    Lossless speculation gives each token the target's probability given all that came before: the tokens, and how
    earlier rounds and this one went up to here. So samples of one history may be told apart by Place, and what a token
    is looked at for may depend on all that came before it.
    """
    groups = Groups.of(samples)
    found = Readings.of(target, draft, seq, samples, groups)
    if bool((found.probs == 0).any()):
        return Evidence(IMPOSSIBLE)
    rounds = torch.tensor([sample.rounds for sample in samples])
    in_round = rounds > 0
    earlier = in_round[:, None] & (rounds[:, None] < rounds[:, :, None])
    before = (earlier * found.excess[:, None]).sum(-1)
    asked = torch.tensor([[bool(tokens) for tokens in sample.candidates] for sample in samples])
    repeats = [[token in some for token, some in zip(s.tokens, s.candidates, strict=True)] for s in samples]
    chances = found.chances[asked]
    return Evidence(
        tokens=groups.test(),
        drafted=Counts.of(found.cells[in_round], found.laws[in_round]),
        alike=Drift.of(before * found.excess, before**2 * found.variances),
        repeated=Counts.of(torch.tensor(repeats)[asked].long(), torch.stack([1 - chances, chances], 1)),
    )


@dataclass(frozen=True)
class Groups:
    """Tokens drawn after one history at one kind of place, where these are many; and the histories' laws, once read."""

    drawn: dict[tuple[Tokens, Place], list[int]]
    laws: dict[Tokens, Tensor]

    @staticmethod
    def of(samples: Seq[Sample]) -> Groups:
        drawn: defaultdict[tuple[Tokens, Place], list[int]] = defaultdict(list)
        for sample in samples:
            for i, (token, place) in enumerate(zip(sample.tokens, sample.places, strict=True)):
                drawn[sample.tokens[:i], place].append(token)
        many = {key: tokens for key, tokens in drawn.items() if len(tokens) >= LEAST_GROUP}
        return Groups(many, {path: torch.empty(0) for path, _ in many})

    def read(self, path: Tokens, log_probs: Tensor) -> None:
        """log_probs: [vocab], the target's of the token after `path`."""
        if path in self.laws and not self.laws[path].numel():
            self.laws[path] = log_probs.double().softmax(-1)

    def test(self) -> ChiSquare:
        found = ChiSquare()
        for (path, _), tokens in self.drawn.items():
            law = self.laws[path]
            found += pearson(torch.tensor(tokens).bincount(minlength=len(law)), law)
        return found


@dataclass(frozen=True)
class Readings:
    """What the models say of each token of each sample; [num_samples, length], float64 where nothing else is said.

    probs: the target's. cells: of RATIOS, int64; laws: their probabilities, [num_samples, length, num_cells].
    excess: draft / (target + draft) of the token less its mean under the target; variances: its own.
    chances: the probability of the token's candidates.
    """

    probs: Tensor
    cells: Tensor
    laws: Tensor
    excess: Tensor
    variances: Tensor
    chances: Tensor

    @staticmethod
    def of(target: Reader, draft: Reader, seq: Sequence, samples: Seq[Sample], groups: Groups) -> Readings:
        length = len(samples[0].tokens)
        at_once = max(1, min(PATHS, *(reader.room(seq.num_prompt, length) for reader in (target, draft))))
        parts = []
        for start in range(0, len(samples), at_once):
            some = samples[start : start + at_once]
            paths = [sample.tokens[:-1] for sample in some]
            both = zip(target.log_probs(seq, paths), draft.log_probs(seq, paths), strict=True)
            columns = []
            for depth, (mine, its) in enumerate(both):
                columns.append(_column(mine, its, some, depth))
                for sample, log_probs in zip(some, mine, strict=True):
                    groups.read(sample.tokens[:depth], log_probs)
            parts.append([torch.stack(column, 1) for column in zip(*columns, strict=True)])
        return Readings(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _column(mine: Tensor, its: Tensor, samples: Seq[Sample], depth: int) -> tuple[Tensor, ...]:
    """The fields of Readings at one position. mine, its: the log-probabilities, [num_samples, vocab]."""
    drawn = torch.tensor([[sample.tokens[depth]] for sample in samples])
    probs, drafted = mine.double().softmax(-1), its.double().softmax(-1)
    cells = torch.bucketize(mine - its, torch.tensor(RATIOS).log())
    laws = torch.zeros(len(samples), len(RATIOS) + 1, dtype=torch.float64).scatter_add_(1, cells, probs)
    shares = (drafted / (probs + drafted)).nan_to_num(0.0)
    mean = (probs * shares).sum(1)
    variance = (probs * shares**2).sum(1) - mean**2
    chances = [float(row[list(s.candidates[depth])].sum()) for s, row in zip(samples, probs, strict=True)]
    return (
        probs.gather(1, drawn)[:, 0],
        cells.gather(1, drawn)[:, 0],
        laws,
        shares.gather(1, drawn)[:, 0] - mean,
        variance.clamp(min=0),
        torch.tensor(chances, dtype=torch.float64).clamp(max=1),
    )
