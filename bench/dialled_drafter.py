"""A drafter that costs what the draft model costs and is right as often as a dial says."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lychee.runtime.drafter import ModelDrafter
from lychee.runtime.goes_on import GoesOn
from lychee.runtime.inputs import SamplingBatch
from lychee.runtime.metrics import Metrics, ratio
from lychee.runtime.proposals import Proposals
from lychee.runtime.sequence import Sequence
from lychee.runtime.tree import ProposedTree, TreeShape

DECK = 64

Native = Mapping[tuple[int, ...], Seq[int]]
"""What the target says natively, and greedily, after each prompt."""


def rank_rates(acceptance: float, sibling: float, ranks: int = 16) -> tuple[float, ...]:
    """How often each rank's child is the target's token: `acceptance`, then `sibling` of what is left each time."""
    rates = [acceptance]
    while len(rates) < ranks:
        rates.append((1 - sum(rates)) * sibling)
    return tuple(rates)


class DialledDrafter:
    """Runs the draft model and throws its tokens away. What is proposed are the target's own, corrupted.

    rates: of each rank of siblings, how often its token is the target's. Whether a token of the text is proposed
    depends on the request's prompt, its place and `seed` alone. Places are dealt from shuffled decks of 64, so that
    rates come out close to what they are set to. Greedy requests only.
    """

    def __init__(self, model: ModelDrafter, native: Native, rates: Seq[float], vocab: int, seed: int = 0) -> None:
        self.model, self.native, self.vocab, self.seed = model, native, vocab, seed
        self.max_len = model.max_len
        self.bounds = np.cumsum(rates)
        self.deck = lru_cache(maxsize=4096)(self._deck)

    def propose(self, batch: SamplingBatch, shapes: Seq[TreeShape], goes_on: GoesOn | None = None) -> Proposals:
        """Whole trees. Raises ValueError where a request is not greedy, or emitted what it did not natively."""
        if not batch.greedy.all():
            raise ValueError("a dialled drafter knows what greedy requests will say, and no others")
        self.model.propose(batch, shapes)
        return Proposals(tuple(self._tree(seq, shape) for seq, shape in zip(batch.seqs, shapes, strict=True)))

    def _tree(self, seq: Sequence, shape: TreeShape) -> ProposedTree:
        native, done = self.native[seq.prompt], seq.num_emitted
        if list(native[:done]) != seq.emitted:
            raise ValueError(f"a request emitted {seq.emitted}, natively {list(native[:done])}: speculation is broken")
        tokens, path = [seq.tokens[-1]], 0  # the node whose path is the native one
        for node, (parent, depth, rank) in enumerate(zip(shape.parents, shape.depths, shape.ranks, strict=True)):
            if node == 0:
                continue
            place = done + depth - 1
            right = native[place] if place < len(native) else 0
            if parent == path and rank == np.searchsorted(self.bounds, self._dealt(seq.prompt, place), "right"):
                tokens.append(right)
                path = node
            else:
                tokens.append((right + 1 + rank) % self.vocab)
        return ProposedTree(shape, tuple(tokens))

    def _dealt(self, prompt: tuple[int, ...], place: int) -> float:
        """From 0 to 1."""
        return float(self.deck(prompt, place // DECK)[place % DECK])

    def _deck(self, prompt: tuple[int, ...], number: int) -> NDArray[np.float64]:
        key = zlib.crc32(np.array(prompt, np.int64).tobytes())
        return (np.random.default_rng([self.seed, key, number]).permutation(DECK) + 0.5) / DECK


def landed(metrics: Metrics) -> float | None:
    """Accepted drafts over those that were tested: at each depth, where the path reached the depth above."""
    reached = (metrics.rounds, *metrics.accepted_at)
    tested = sum(min(above, drafted) for above, drafted in zip(reached, metrics.drafted_at, strict=False))
    return ratio(sum(metrics.accepted_at), tested)
