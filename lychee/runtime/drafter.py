"""Drafters: who proposes the tokens that the target verifies."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lychee.kernels import draw, process_logits
from lychee.kernels.philox import DRAFT, TARGET
from lychee.models.compiled import CompiledLlama
from lychee.models.kv_cache import KVCache
from lychee.models.layout import Ints, Rows, ints
from lychee.models.llama import Llama

from .draft_loop import DraftLoop, Drawn
from .inputs import SamplingBatch
from .nodes import DraftPlan, Level, split
from .proposals import Proposals, refuse_undrawn, undrafted
from .sequence import Sequence
from .tree import ProposedTree, TreeShape


class Drafter(Protocol):
    """Proposes a tree per sequence. `max_len` is the longest prefix it can draft from, root included."""

    max_len: int

    def propose(self, batch: SamplingBatch, shapes: Seq[TreeShape]) -> Proposals: ...


class ModelDrafter:
    """A draft model over the target's blocks, with KV storage of its own. Drafts chains."""

    def __init__(self, model: Llama, kv: KVCache, vocab: int, max_num_batched_tokens: int) -> None:
        self.model, self.kv, self.vocab = model, kv, vocab
        self.compiled, self.loop = CompiledLlama(model, kv), DraftLoop(model, kv, vocab)
        self.max_len = model.config.max_positions
        self.max_num_batched_tokens = max_num_batched_tokens

    def propose(self, batch: SamplingBatch, shapes: Seq[TreeShape]) -> Proposals:
        """Draw each sequence's tree; sequences with a one-node shape are left alone, their draft KV stays behind."""
        active = tuple(i for i, shape in enumerate(shapes) if shape.num_nodes > 1)
        if not active:
            return undrafted(batch.seqs)
        self._catch_up([batch.seqs[i] for i in active])
        plan = DraftPlan.of(tuple(shapes[i] for i in active))
        drawn = self.loop.run(batch, active, plan)
        if drawn is None:
            drawn = self._level_by_level(batch, active, plan)
        roots = ints([batch.seqs[i].tokens[-1] for i in active])
        tokens = plan.node_tokens(roots, drawn.tokens)
        if tokens.min() < 0:
            refuse_undrawn(plan.bury(tokens), "draft")
        trees = [ProposedTree(shape, (seq.tokens[-1],)) for seq, shape in zip(batch.seqs, shapes, strict=True)]
        for i, mine in zip(active, split(tokens, plan.cu_nodes), strict=True):
            trees[i] = ProposedTree(shapes[i], tuple(mine))
        return Proposals(tuple(trees), self._kept(shapes, active, plan, drawn.log_probs))

    def _kept(
        self, shapes: Seq[TreeShape], active: tuple[int, ...], plan: DraftPlan, levels: Seq[Tensor]
    ) -> Tensor | None:
        """A row for every node of the batch; `levels` has one for every node of each frontier."""
        if not levels:
            return None
        first = np.cumsum([0, *(shape.num_nodes for shape in shapes)])
        kept = levels[0].new_zeros(int(first[-1]), self.vocab)
        for level, log_probs in zip(plan.levels, levels, strict=True):
            nodes = first[list(active)][level.frontier.seq_idx] + level.frontier.nodes
            kept[torch.from_numpy(nodes).to(kept.device)] = log_probs
        return kept

    def _level_by_level(self, batch: SamplingBatch, active: tuple[int, ...], plan: DraftPlan) -> Drawn:
        """The same as the loop does, from the host."""
        seqs, kept = [batch.seqs[i] for i in active], any(batch.rejection[i] for i in active)
        before, blocks = [seq.cached - 1 for seq in seqs], [seq.blocks for seq in seqs]
        tokens = ints([token for seq in seqs for token in seq.tokens[-2:]])
        drawn, log_probs = np.full(plan.num_draws, -1, np.int32), []
        draws, roots, begin = drawn, ints([seq.tokens[-1] for seq in seqs]), 0
        for level in plan.levels:
            if level.token_from is not None:
                tokens = draws[level.token_from]
            rows = Rows.of(level.rows, tokens, before, blocks, self.kv.block_size, level.logit_rows)
            logits = self.compiled.forward(rows)
            at = ints(active)[level.frontier.seq_idx]
            paths = split(plan.node_tokens(roots, drawn), plan.cu_nodes) if batch.window else []
            found = process_logits(logits, batch.rows(at, level.frontier, paths), batch.params, self.vocab)
            draws = self._draw(batch, at, level, found).ravel()
            drawn[begin : begin + len(draws)] = draws
            begin += len(draws)
            if kept:
                log_probs.append(found)
        return Drawn(drawn, log_probs)

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
            rows = Rows.prefill(
                tokens=tokens,
                context_lens=starts,
                block_tables=tables,
                block_size=self.kv.block_size,
                logit_rows=[],
            )
            self.compiled.forward(rows)


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
