"""Drafters: who proposes the tokens that the target verifies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Protocol

import torch
from torch import Tensor

from lychee.kernels import draw, process_logits
from lychee.kernels.philox import DRAFT, TARGET
from lychee.models.batch import Batch
from lychee.models.compiled import CompiledLlama
from lychee.models.kv_cache import KVCache
from lychee.models.llama import Llama

from .draft_loop import DraftLoop
from .inputs import SamplingBatch
from .sequence import Sequence
from .tree import ProposedTree, TreeShape


@dataclass(frozen=True)
class Proposals:
    """One proposed tree per sequence.

    draft_log_probs: [num_nodes, vocab] fp32; row v is what v's children were drawn from. None where no sequence is
    accepted by rejection, which alone reads it.
    """

    trees: tuple[ProposedTree, ...]
    draft_log_probs: Tensor | None = None


class Drafter(Protocol):
    """Proposes a tree per sequence. `max_len` is the longest prefix it can draft from, root included."""

    max_len: int

    def propose(self, batch: SamplingBatch, shapes: Seq[TreeShape]) -> Proposals: ...


def refuse_undrawn(tokens: Iterable[int], model: str) -> None:
    """A draw is -1 where no token has a probability. Raises ArithmeticError."""
    if min(tokens, default=0) < 0:
        raise ArithmeticError(
            f"the {model} model's logits are not finite: its weights hold NaN or infinity, or overflow in this dtype"
        )


def undrafted(seqs: Seq[Sequence]) -> Proposals:
    """One node each: plain decoding."""
    return Proposals(tuple(ProposedTree(TreeShape.chain(0), (seq.tokens[-1],)) for seq in seqs))


class ModelDrafter:
    """A draft model over the target's blocks, with KV storage of its own. Drafts chains."""

    def __init__(self, model: Llama, kv: KVCache, vocab: int, max_num_batched_tokens: int) -> None:
        self.model, self.kv, self.vocab = model, kv, vocab
        self.compiled, self.loop = CompiledLlama(model, kv), DraftLoop(model, kv, vocab)
        self.max_len = model.config.max_positions
        self.max_num_batched_tokens = max_num_batched_tokens

    def propose(self, batch: SamplingBatch, shapes: Seq[TreeShape]) -> Proposals:
        """Draw each sequence's chain; sequences with a one-node shape are left alone, their draft KV stays behind."""
        lengths = [shape.num_nodes - 1 for shape in shapes]
        active = [i for i, length in enumerate(lengths) if length]
        if not active:
            return undrafted(batch.seqs)
        self._catch_up([batch.seqs[i] for i in active])
        first = self._rows(batch, active, [], 0)
        looped = self.loop.run(batch, first, active, [lengths[i] for i in active])
        if looped is None:
            return self._level_by_level(batch, shapes, first, active)
        tokens, most = [[seq.tokens[-1]] for seq in batch.seqs], max(lengths)
        for i, drawn in zip(active, torch.cat(looped[:most], 1).tolist(), strict=True):
            tokens[i] += drawn[: lengths[i]]
        refuse_undrawn(chain.from_iterable(tokens), "draft")
        levels = [
            log_probs[[row for row, i in enumerate(active) if lengths[i] > depth]]
            for depth, log_probs in enumerate(looped[most:])
        ]
        return self._proposals(shapes, tokens, levels)

    def _level_by_level(
        self, batch: SamplingBatch, shapes: Seq[TreeShape], first: Batch, active: list[int]
    ) -> Proposals:
        """The same, from the host."""
        lengths, levels = [shape.num_nodes - 1 for shape in shapes], []
        kept = any(batch.rejection[i] for i in active)
        tokens = [[seq.tokens[-1]] for seq in batch.seqs]
        for depth in range(max(lengths)):
            active = [i for i in active if lengths[i] > depth]
            logits = self.compiled.forward(self._rows(batch, active, tokens, depth) if depth else first)
            nodes = [(i, ProposedTree(shapes[i], tuple(tokens[i])), depth) for i in active]
            log_probs = process_logits(logits, batch.rows(nodes), batch.params, self.vocab)
            for i, token in zip(active, self._draw(batch, active, log_probs, depth), strict=True):
                tokens[i].append(token)
            if kept:
                levels.append(log_probs)
        return self._proposals(shapes, tokens, levels)

    def _proposals(self, shapes: Seq[TreeShape], tokens: Seq[Seq[int]], levels: Seq[Tensor]) -> Proposals:
        """`levels`: of each depth what its tokens were drawn from, a row for every sequence that drew one."""
        trees = tuple(ProposedTree(shape, tuple(drawn)) for shape, drawn in zip(shapes, tokens, strict=True))
        if not levels:
            return Proposals(trees)
        first_row = [0, *accumulate(shape.num_nodes for shape in shapes)]
        kept = levels[0].new_zeros(first_row[-1], self.vocab)
        for depth, log_probs in enumerate(levels):
            nodes = [row + depth for row, shape in zip(first_row, shapes, strict=False) if shape.num_nodes - 1 > depth]
            kept[torch.tensor(nodes, device=kept.device)] = log_probs
        return Proposals(trees, kept)

    def _rows(self, batch: SamplingBatch, active: Seq[int], tokens: Seq[Seq[int]], depth: int) -> Batch:
        """The rows whose last one predicts the next level.

        At the root they are two, so that rounds are alike: the token before it may lack draft KV, and where it does not
        it is computed again, to the same bits.
        """
        seqs = [batch.seqs[i] for i in active]
        if depth:
            starts = [seq.cached + depth for seq in seqs]
            rows = [[tokens[i][depth]] for i in active]
        else:
            starts = [max(0, seq.cached - 1) for seq in seqs]
            rows = [seq.tokens[start:] for seq, start in zip(seqs, starts, strict=True)]
        return Batch.decode(
            tokens=rows,
            parents=[TreeShape.chain(len(row) - 1).parents for row in rows],
            context_lens=starts,
            block_tables=[seq.blocks for seq in seqs],
            block_size=self.kv.block_size,
            device=batch.device,
            logit_rows=None if depth else [end - 1 for end in accumulate(map(len, rows))],
        )

    def _draw(self, batch: SamplingBatch, active: Seq[int], log_probs: Tensor, depth: int) -> list[int]:
        """The next level's tokens: by the draft's own noise under rejection, by the target's noise when coupled."""
        drawn = [0] * len(active)
        for own, stream in ((True, DRAFT), (False, TARGET)):
            rows = [row for row, i in enumerate(active) if batch.rejection[i] is own]
            if not rows:
                continue
            seqs = [active[row] for row in rows]
            roots = [batch.seqs[i].cached for i in seqs]
            positions = roots if own else [root + depth + 1 for root in roots]
            keys = batch.keys(seqs, positions, [depth if own else 0] * len(rows))
            part = log_probs if len(rows) == len(active) else log_probs[torch.tensor(rows, device=log_probs.device)]
            for row, token in zip(rows, draw(part, keys, 1, stream, False).flatten().tolist(), strict=True):
                drawn[row] = token
        refuse_undrawn(drawn, "draft")
        return drawn

    def _catch_up(self, seqs: Seq[Sequence]) -> None:
        """Prefill the draft's KV up to the root where it lags by more than the one token that a full accept leaves."""
        while behind := [seq for seq in seqs if seq.cached - seq.draft_cached > 1]:
            budget, tokens, starts, tables = self.max_num_batched_tokens, [], [], []
            for seq in behind:
                stop = min(seq.cached, seq.draft_cached + budget)
                if stop > seq.draft_cached:
                    tokens.append(seq.tokens[seq.draft_cached : stop])
                    starts.append(seq.draft_cached)
                    tables.append(seq.blocks)
                    budget -= stop - seq.draft_cached
                    seq.draft_cached = stop
            batch = Batch.prefill(
                tokens=tokens,
                context_lens=starts,
                block_tables=tables,
                block_size=self.kv.block_size,
                device=self.kv.storage.device,
                logit_rows=[],
            )
            self.compiled.forward(batch)


class ScriptedDrafter:
    """Proposes the tokens that `script(sequence, length)` returns, at most `length`; their draft probability is 1."""

    max_len = 1 << 30

    def __init__(self, script: Callable[[Sequence, int], Seq[int]], vocab: int) -> None:
        self.script, self.vocab = script, vocab

    def propose(self, batch: SamplingBatch, shapes: Seq[TreeShape]) -> Proposals:
        trees = []
        for seq, shape in zip(batch.seqs, shapes, strict=True):
            drafted = tuple(self.script(seq, shape.num_nodes - 1))[: shape.num_nodes - 1] if shape.num_nodes > 1 else ()
            trees.append(ProposedTree(TreeShape.chain(len(drafted)), (seq.tokens[-1], *drafted)))
        log_probs = None
        if any(batch.rejection):
            rows = [token for tree in trees for token in (*tree.tokens[1:], 0)]
            log_probs = torch.full((len(rows), self.vocab), float("-inf"), device=batch.device)
            log_probs[torch.arange(len(rows)), torch.tensor(rows)] = 0.0
        return Proposals(tuple(trees), log_probs)
