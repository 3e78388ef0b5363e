"""Negative controls: engines that are broken in known ways, which the proofs must catch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from ..kernels.types import SeqKeys
from ..models.layout import Rows
from ..runtime.acceptance import Accepted
from ..runtime.drafter import Drafter, ModelDrafter
from ..runtime.engine import Engine
from ..runtime.goes_on import GoesOn
from ..runtime.inputs import SamplingBatch
from ..runtime.proposals import Proposals
from ..runtime.tree import ProposedTree, TreeShape
from ..runtime.verifier import Verifier


@dataclass(frozen=True)
class Control:
    """A break, and the part of an engine that has it in place of the sound one."""

    what: str
    drafter: Callable[[ModelDrafter], Drafter] | None = None
    verifier: Callable[[Verifier], Verifier] | None = None


@contextmanager
def broken(engine: Engine, control: Control) -> Iterator[None]:
    """The engine with the break, for as long as the block lasts."""
    sound = engine.drafter, engine.verifier
    assert isinstance(engine.drafter, ModelDrafter)
    try:
        if control.drafter:
            engine.drafter = control.drafter(engine.drafter)
        if control.verifier:
            engine.verifier = control.verifier(engine.verifier)
        yield
    finally:
        engine.drafter, engine.verifier = sound


class DraftsGreedily(ModelDrafter):
    """Proposes the draft's likeliest tokens, and says that they were drawn from its probabilities."""

    def __init__(self, sound: ModelDrafter) -> None:
        super().__init__(sound.model, sound.kv, sound.pool, sound.vocab, sound.max_num_batched_tokens)
        self.compiled, self.loop = sound.compiled, sound.loop

    def propose(self, batch: SamplingBatch, shapes: Seq[TreeShape], goes_on: GoesOn | None = None) -> Proposals:
        return super().propose(replace(batch, greedy=np.ones_like(batch.greedy)), shapes, goes_on)


class NoResidual(Verifier):
    """After a rejection, draws from the target's whole distribution; `fallback_sampling=False` is that."""

    def __init__(self, sound: Verifier) -> None:
        super().__init__(sound.target, sound.vocab, replace(sound.rule, lossless=False), sound.buckets)


class SameNoise(SamplingBatch):
    """Accepts and recovers in every round with the noise of one and the same."""

    def seq_keys(self) -> SeqKeys:
        keys = super().seq_keys()
        return replace(keys, root_positions=torch.zeros_like(keys.root_positions))


class ReusesNoise(Verifier):
    def __init__(self, sound: Verifier) -> None:
        super().__init__(sound.target, sound.vocab, sound.rule, sound.buckets)

    def run(self, rows: Rows, proposals: Proposals, sampling: SamplingBatch) -> tuple[Tensor, Accepted]:
        same = SameNoise(*(getattr(sampling, field.name) for field in fields(sampling)))
        return super().run(rows, proposals, same)


class EmitsUnverified(Verifier):
    """Where the target refuses all that was drafted, emits the first draft token in place of the target's own."""

    def __init__(self, sound: Verifier) -> None:
        super().__init__(sound.target, sound.vocab, sound.rule, sound.buckets)

    def run(self, rows: Rows, proposals: Proposals, sampling: SamplingBatch) -> tuple[Tensor, Accepted]:
        logits, accepted = super().run(rows, proposals, sampling)
        tokens = tuple(map(_unverified, proposals.trees, accepted.tokens))
        return logits, replace(accepted, tokens=tokens)


def _unverified(tree: ProposedTree, emitted: tuple[int, ...]) -> tuple[int, ...]:
    return (tree.tokens[1],) if len(emitted) == 1 and tree.shape.num_nodes > 1 else emitted


UNVERIFIED = Control("a draft token that the target refused is emitted", verifier=EmitsUnverified)
OF_SAMPLES = (
    Control("drafts are the draft's likeliest tokens, accepted as if drawn", drafter=DraftsGreedily),
    Control("after a rejection the target's whole distribution is drawn from", verifier=NoResidual),
    Control("a round accepts with noise that an earlier round has used", verifier=ReusesNoise),
)
