"""Drafting chains as one program: all passes and draws of a round replayed by one native call.

The only thing that a pass takes from the one before it is the token drawn, and that stays in the program's memory. What
else a level reads (positions, slots, noise counters) is known when the round begins and written for all levels at once.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lychee.compiler import Buckets, Lowered, Program, Size, Tracer, trace
from lychee.kernels import draw, process_logits
from lychee.kernels.kernel import can_bind
from lychee.kernels.philox import DRAFT, TARGET
from lychee.kernels.types import NoiseKeys, SamplingRows, SamplingTensors
from lychee.models.batch import Batch
from lychee.models.compiled import bucket, fill
from lychee.models.kv_cache import KVCache
from lychee.models.llama import Llama

from .inputs import SamplingBatch

# Rows of the matrix `levels` for each level: a number per sequence.
AT, SLOT, DEPTH, NOISE_AT, NODE = FIELDS = range(5)
SEQS = (Size("num_seqs"),)


class DraftLoop:
    """The captured loop of a draft model, for each length and number of sequences that comes again."""

    def __init__(self, model: Llama, kv: KVCache, vocab: int, buckets: Buckets | None = None) -> None:
        self.model, self.kv, self.vocab = model, kv, vocab
        self.binds = can_bind(kv.storage.device)
        self.buckets = buckets or Buckets()
        self.program = lru_cache(maxsize=None)(self._program)
        self._filled: WeakKeyDictionary[Lowered, tuple[SamplingBatch, tuple[int, ...]]] = WeakKeyDictionary()

    def run(self, batch: SamplingBatch, first: Batch, active: Seq[int], lengths: Seq[int]) -> tuple[Tensor, ...] | None:
        """Tokens drawn at each level [len(active), 1]; then, under rejection, the log-probabilities of each level.

        `first` has the rows of level 0; `active` and `lengths` are the sequences that draft, and how far. What a
        sequence draws at levels from its length on is of no meaning. None where the loop has to run level by level:
        penalties and bad words look at tokens that the host does not know yet, and noise is of one stream.
        """
        own = {batch.rejection[i] for i in active}
        if not self.binds or batch.window or len(own) > 1:
            return None
        length, rejection = max(lengths), own.pop()
        sizes = {**bucket(first, length), **batch.param_widths, "num_params": len(batch.seqs)}
        name = length, rejection
        lowered = self.buckets.lowered(name, lambda: self.program(*name), sizes)
        if lowered is None:
            return None
        self._fill(lowered, batch, first, tuple(active), lengths, rejection)
        lowered.replay()
        return lowered.results

    def _program(self, length: int, rejection: bool) -> Program:
        def loop(tracer: Tracer) -> tuple[Tensor, ...]:
            levels = tracer.tensor("levels", (length * len(FIELDS), *SEQS), torch.int32)
            seq_idx = tracer.tensor("seq_idx_later", SEQS, torch.int32)
            cu_seqlens_q = tracer.tensor("cu_seqlens_q_later", (Size("num_seqs") + 1,), torch.int32)
            zeros = tracer.tensor("zeros", (*SEQS, 1), torch.int32)
            param_idx = tracer.tensor("param_idx", SEQS, torch.int32)
            seeds = tracer.tensor("seeds", SEQS, torch.int64)
            sample_idx = tracer.tensor("sample_idx", SEQS, torch.int32)
            greedy = tracer.tensor("greedy", SEQS, torch.bool)
            rename = {"num_seqs": "num_params"}
            params = tracer.struct(SamplingTensors, rename, token_counts=None)
            now = tracer.struct(Batch, {"num_logit_rows": "num_seqs"}, block_size=self.kv.block_size)
            drawn: list[Tensor] = []
            kept: list[Tensor] = []
            for level in range(length):
                at, slot, depth, noise_at, node = (levels[level * len(FIELDS) + field] for field in FIELDS)
                if level:
                    paging = replace(
                        now.paging, cu_seqlens_q=cu_seqlens_q, seq_idx=seq_idx, context_lens=at, max_rows=1
                    )
                    now = Batch(drawn[-1].flatten(), at, slot, paging, zeros, None)
                logits = self.model.forward(now, self.kv)
                rows = SamplingRows(param_idx, at, depth, zeros)
                kept.append(process_logits(logits, rows, params, self.vocab))
                keys = NoiseKeys(seeds, noise_at, node, sample_idx, greedy)
                drawn.append(draw(kept[-1], keys, 1, DRAFT if rejection else TARGET, False))
            return (*drawn, *kept) if rejection else tuple(drawn)

        return trace(loop, self.kv.storage.device)

    def _fill(
        self,
        lowered: Lowered,
        batch: SamplingBatch,
        first: Batch,
        active: tuple[int, ...],
        lengths: Seq[int],
        rejection: bool,
    ) -> None:
        levels, seq_idx, cu_seqlens_q, _zeros, param_idx, seeds, sample_idx, greedy, *others = lowered.inputs
        params = batch.param_tensors
        length = len(levels) // len(FIELDS)
        levels.copy_(torch.from_numpy(self._levels(batch, active, lengths, length, rejection)))
        fill(others[len(params) :], first)
        known, same = self._filled.get(lowered, (None, ()))
        if known is batch and same == active:
            return
        self._filled[lowered] = batch, active
        at = np.array(active)
        for place, values in ((seeds, batch.seeds), (sample_idx, batch.sample_idx), (greedy, batch.greedy)):
            place.copy_(torch.from_numpy(values[at]))
        param_idx.copy_(torch.from_numpy(at))
        torch.arange(len(at), out=seq_idx)
        torch.arange(len(at) + 1, out=cu_seqlens_q)
        for place, tensor in zip(others, params, strict=False):
            place.copy_(tensor)

    def _levels(
        self, batch: SamplingBatch, active: Seq[int], lengths: Seq[int], length: int, rejection: bool
    ) -> NDArray[np.int32]:
        """[length * fields, len(active)]: level 0 reads the rows of its batch, so it has no slot here."""
        roots, most = np.array([batch.seqs[i].cached for i in active]), np.array(lengths)
        depth = np.arange(length)[:, None]
        at = roots + np.minimum(depth, most - 1)  # past its length a sequence stays where it was, and stores nothing
        size = self.kv.block_size
        tables = [batch.seqs[i].blocks for i in active]
        blocks = np.array(
            [[table[place // size] for place in places] for table, places in zip(tables, at.T, strict=True)]
        )
        slots = np.where(depth < most, blocks.T * size + at % size, -1)
        noise_at = np.broadcast_to(roots, at.shape) if rejection else roots + depth + 1
        depths = np.broadcast_to(depth, at.shape)
        nodes = depths if rejection else np.zeros_like(at)
        return np.stack([at, slots, depths, noise_at, nodes], 1).reshape(-1, len(roots)).astype(np.int32)
