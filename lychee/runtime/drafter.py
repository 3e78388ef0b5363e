"""Drafters: who proposes the tokens that the target verifies."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lychee.kernels import confidence, draw, process_logits
from lychee.kernels.philox import DRAFT, TARGET
from lychee.models.compiled import CompiledLlama
from lychee.models.kv_cache import KVCache
from lychee.models.layout import Ints, Rows, ints
from lychee.models.llama import Llama

from .blocks import BlockPool
from .draft_loop import DraftLoop, Drawn
from .drafting import Drafting
from .goes_on import GoesOn
from .inputs import SamplingBatch
from .nodes import DraftPlan, Level, Segment, split
from .proposals import Proposals, undrafted
from .sequence import Sequence
from .tree import ProposedTree, TreeShape


class Drafter(Protocol):
    """Proposes a tree per sequence. `max_len` is the longest prefix it can draft from, root included."""

    max_len: int

    def propose(self, batch: SamplingBatch, shapes: Seq[TreeShape], goes_on: GoesOn | None = None) -> Proposals: ...


class ModelDrafter:
    """A draft model over the target's blocks, with KV storage of its own."""

    def __init__(self, model: Llama, kv: KVCache, pool: BlockPool, vocab: int, max_num_batched_tokens: int) -> None:
        self.model, self.kv, self.pool, self.vocab = model, kv, pool, vocab
        self.compiled, self.loop = CompiledLlama(model, kv), DraftLoop(model, kv, vocab)
        self.max_len = model.config.max_positions
        self.max_num_batched_tokens = max_num_batched_tokens

    def propose(self, batch: SamplingBatch, shapes: Seq[TreeShape], goes_on: GoesOn | None = None) -> Proposals:
        """Draw each sequence's tree; sequences with a one-node shape are left alone, their draft KV stays behind.

        So are, where others wait, those whose prompt takes more than one pass to catch up with: they have it next time.
        """
        active = tuple(i for i, shape in enumerate(shapes) if shape.num_nodes > 1)
        if not active:
            return undrafted(batch.seqs)
        self._catch_up([batch.seqs[i] for i in active], whole=len(batch.seqs) == 1)
        behind = {i for i in active if self._lag(batch.seqs[i]) > 1}
        if behind:
            shapes = [TreeShape.chain(0) if i in behind else shape for i, shape in enumerate(shapes)]
            active = tuple(i for i in active if i not in behind)
        if not active:
            return undrafted(batch.seqs)
        drafting = Drafting.start(batch, shapes)
        while active:
            plan = DraftPlan.of(tuple(shapes[i] for i in active))
            first, depth = drafting.levels[active[0]], len(plan.levels)
            asked = goes_on if goes_on and 0 < goes_on.levels < depth else None
            segment = plan.segment(first, min(first + asked.levels, depth) if asked else depth)
            before = drafting.tokens_of(active)
            seqs = [batch.seqs[i] for i in active]
            if first:
                tokens = before[segment.token_rows]
            else:
                tokens = ints([token for seq in seqs for token in seq.tokens[-2:]])
            drawn = self.loop.run(batch, active, segment, tokens, asked is not None)
            if drawn is None:
                drawn = self._level_by_level(batch, active, segment, tokens, before, asked is not None)
            drafting.add(active, segment, drawn, self.vocab)
            if asked:
                told = [
                    asked(s.seq_id, drafting.levels[i], drafting.sure[i]) for s, i in zip(seqs, active, strict=True)
                ]
                active = tuple(i for i, more in zip(active, told, strict=True) if more)
            active = tuple(i for i in active if shapes[i].depth > segment.last)
        return drafting.proposals()

    def _level_by_level(
        self,
        batch: SamplingBatch,
        active: tuple[int, ...],
        segment: Segment,
        tokens: Ints,
        before: Ints,
        confident: bool,
    ) -> Drawn:
        """The same as the loop does, from the host. before: tokens of all nodes, as far as they are drawn."""
        plan, seqs, kept = segment.plan, [batch.seqs[i] for i in active], any(batch.rejection[i] for i in active)
        contexts, blocks = [seq.cached - 1 for seq in seqs], [seq.blocks for seq in seqs]
        known, draws, every, log_probs, sure = before.copy(), tokens, [], [], []
        drawn, begin = np.full(plan.num_draws, -1, np.int32), plan.draws_before(segment.first)
        for nth, level in enumerate(segment.levels):
            if nth and level.token_from is not None:
                tokens = draws[level.token_from]
            rows = Rows.of(level.rows, tokens, contexts, blocks, self.kv.block_size, level.logit_rows)
            logits = self.compiled.forward(rows)
            if confident:
                sure.append(confidence(logits, self.vocab).cpu().numpy())
            at = ints(active)[level.frontier.seq_idx]
            paths = split(known, plan.cu_nodes) if batch.window else []
            found = process_logits(logits, batch.rows(at, level.frontier, paths), batch.params, self.vocab)
            draws = self._draw(batch, at, level, found).ravel()
            drawn[begin : begin + len(draws)] = draws
            begin += len(draws)
            nodes = np.flatnonzero(plan.depths == segment.first + nth + 1)
            known[nodes] = drawn[plan.drawn_at[nodes]]
            every.append(draws)
            if kept:
                log_probs.append(found)
        return Drawn(np.concatenate(every), log_probs, sure)

    def _draw(self, batch: SamplingBatch, at: Ints, level: Level, log_probs: Tensor) -> Ints:
        """[rows, num_children]: by the draft's own noise under rejection, by the target's noise when coupled."""
        drawn = np.empty((len(at), level.num_children), np.int32)
        roots, frontier = ints([seq.cached for seq in batch.seqs])[at], level.frontier
        by_rejection = np.array(batch.rejection)[at]
        for own, stream in ((True, DRAFT), (False, TARGET)):
            rows = np.flatnonzero(by_rejection == own)
            if not len(rows):
                continue
            positions = roots if own else roots + frontier.depths + 1
            nodes = frontier.nodes if own else np.zeros_like(frontier.nodes)
            keys = batch.keys(at[rows], positions[rows].astype(np.int32), nodes[rows])
            part = log_probs if len(rows) == len(at) else log_probs[torch.from_numpy(rows).to(log_probs.device)]
            drawn[rows] = draw(part, keys, level.num_children, stream, False).cpu().numpy()
        return drawn

    def _catch_up(self, seqs: Seq[Sequence], whole: bool) -> None:
        """Prefill the draft's KV up to the root where it lags by more than the one token that a full accept leaves.

        A block that several sequences share is filled by one of them, once. whole: until none lags, else by one pass.
        """
        while behind := [seq for seq in seqs if self._lag(seq) > 1]:
            budget, taken = self.max_num_batched_tokens, set[int]()
            chunks: list[tuple[Sequence, int]] = []
            for seq in behind:
                stop = self._stop(seq, budget, taken)
                if stop > seq.draft_cached:
                    chunks.append((seq, stop))
                    taken.update(seq.blocks[seq.draft_cached // self.pool.block_size : self.pool.blocks_for(stop)])
                    budget -= stop - seq.draft_cached
            rows = Rows.prefill(
                tokens=[seq.tokens[seq.draft_cached : stop] for seq, stop in chunks],
                context_lens=[seq.draft_cached for seq, _ in chunks],
                block_tables=[seq.blocks for seq, _ in chunks],
                block_size=self.kv.block_size,
                logit_rows=[],
            )
            self.compiled.forward(rows)
            for seq, stop in chunks:
                for nth in range(seq.draft_cached // self.pool.block_size, self.pool.blocks_for(stop)):
                    filled = min(stop - nth * self.pool.block_size, self.pool.block_size)
                    self.pool.drafted[seq.blocks[nth]] = filled
                seq.draft_cached = stop
            if not whole:
                return

    def _stop(self, seq: Sequence, budget: int, taken: set[int]) -> int:
        """Where the sequence's next chunk ends: before a block that another fills, or that has been filled."""
        size, stop = self.pool.block_size, min(seq.cached, seq.draft_cached + budget)
        first = seq.draft_cached // size
        for nth in range(first, self.pool.blocks_for(stop)):
            block = seq.blocks[nth]
            if block in taken or (nth > first and self.pool.drafted[block]):
                return nth * size
        return stop

    def _lag(self, seq: Sequence) -> int:
        """Tokens that the draft has no KV of, after what others have filled in shared blocks since."""
        size = self.pool.block_size
        while seq.draft_cached < seq.cached:
            nth = seq.draft_cached // size
            drafted = min(nth * size + self.pool.drafted[seq.blocks[nth]], seq.cached)
            if drafted <= seq.draft_cached:
                break
            seq.draft_cached = drafted
        return seq.cached - seq.draft_cached


class ScriptedDrafter:
    """Proposes the tokens that `script(sequence, length)` returns, at most `length`; their draft probability is 1.

    Its trees are drafted whole.
    """

    max_len = 1 << 30

    def __init__(self, script: Callable[[Sequence, int], Seq[int]], vocab: int) -> None:
        self.script, self.vocab = script, vocab

    def propose(self, batch: SamplingBatch, shapes: Seq[TreeShape], goes_on: GoesOn | None = None) -> Proposals:
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
