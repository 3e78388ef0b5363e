"""One pass of the target over the proposed trees, and what is accepted of them: on the CPU a single program."""

from __future__ import annotations

from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from lychee.compiler import Buckets, Lowered, Program, Size, Tracer, trace
from lychee.kernels import process_logits
from lychee.kernels.types import NoiseKeys, SamplingRows, SamplingTensors, Tree
from lychee.models.batch import Batch
from lychee.models.compiled import CompiledLlama, bucket, fill

from .acceptance import Accepted, accept, follow, told
from .drafter import Proposals
from .inputs import SamplingBatch

ROWS = (Size("num_tokens"),)


class Verifier:
    """The target's logits, and the paths and tokens accepted. Logits last until the next call."""

    def __init__(self, target: CompiledLlama, vocab: int, lossless: bool, buckets: Buckets | None = None) -> None:
        self.target, self.vocab, self.lossless = target, vocab, lossless
        self.buckets = buckets or Buckets()
        self._filled: WeakKeyDictionary[Lowered, tuple[Any, ...]] = WeakKeyDictionary()

    def run(self, rows: Batch, proposals: Proposals, sampling: SamplingBatch) -> tuple[Tensor, Accepted]:
        """`rows` are the nodes of `proposals.trees`."""
        lowered = None
        if self.target.binds and not sampling.window and not any(sampling.rejection):
            sizes = {**bucket(rows), **sampling.param_widths}
            lowered = self.buckets.lowered("verify", lambda: self.program, sizes)
        if lowered is None:
            logits = self.target.forward(rows)
            return logits, accept(proposals, logits, sampling, self.vocab, self.lossless)
        self._fill(lowered, rows, proposals, sampling)
        lowered.replay()
        logits, *found = lowered.results
        return logits, told(proposals, *found)

    @cached_property
    def program(self) -> Program:
        """Forward, process, draw, follow; of requests whose tokens are the target's own draws."""

        def verify(tracer: Tracer) -> tuple[Tensor, ...]:
            noise_at, parents, depths, nodes, sample_idx = (
                tracer.tensor(name, ROWS, torch.int32)
                for name in ("noise_at", "parents", "depths", "noise_nodes", "sample_idx")
            )
            seeds, greedy = tracer.tensor("seeds", ROWS, torch.int64), tracer.tensor("greedy", ROWS, torch.bool)
            params = tracer.struct(SamplingTensors, token_counts=None)
            batch = tracer.struct(Batch, block_size=self.target.kv.block_size, logit_rows=None)
            logits = self.target.model.forward(batch, self.target.kv)
            rows = SamplingRows(batch.paging.seq_idx, batch.positions, depths, batch.tokens.view(-1, 1))
            keys = NoiseKeys(seeds, noise_at, nodes, sample_idx, greedy)
            tree = Tree(batch.paging.cu_seqlens_q, batch.tokens, parents)
            assert batch.ancestors is not None
            log_probs = process_logits(logits, rows, params, self.vocab)
            return logits, *follow(log_probs, keys, tree, batch.ancestors.shape[1])

        return trace(verify, self.target.kv.storage.device)

    def _fill(self, lowered: Lowered, rows: Batch, proposals: Proposals, sampling: SamplingBatch) -> None:
        noise_at, parents, depths, _nodes, sample_idx, seeds, greedy, *others = lowered.inputs
        params = sampling.param_tensors
        torch.add(rows.positions, 1, out=noise_at)
        fill(others[len(params) :], rows)
        shapes = [tree.shape for tree in proposals.trees]
        known, same = self._filled.get(lowered, (None, []))
        if known is sampling and same == shapes:
            return
        self._filled[lowered] = sampling, shapes
        at = np.repeat(np.arange(len(shapes)), [shape.num_nodes for shape in shapes])
        for place, values in (
            (parents, np.array([parent for shape in shapes for parent in shape.parents])),
            (depths, np.array([depth for shape in shapes for depth in shape.depths])),
            (sample_idx, sampling.sample_idx[at]),
            (seeds, sampling.seeds[at]),
            (greedy, sampling.greedy[at]),
        ):
            place.copy_(torch.from_numpy(values))
        for place, tensor in zip(others, params, strict=False):
            place.copy_(tensor)
