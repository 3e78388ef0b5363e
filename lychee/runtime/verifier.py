"""One pass of the target over the proposed trees, and what is accepted of them: on the CPU a single program."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lychee.compiler import Buckets, Program, Size, Tracer, optimized, trace
from lychee.kernels import process_logits
from lychee.kernels.types import NoiseKeys, SamplingRows, SamplingTensors, Tree
from lychee.models.batch import Batch
from lychee.models.compiled import CompiledLlama, bucket, inputs_of
from lychee.models.layout import Rows

from .acceptance import Accepted, Rule, accept, follow, told
from .inputs import RowNoise, SamplingBatch
from .nodes import Nodes
from .proposals import Proposals

ROWS = (Size("num_tokens"),)


class Verifier:
    """The target's logits, and the paths and tokens accepted. Logits last until the next call."""

    def __init__(self, target: CompiledLlama, vocab: int, rule: Rule, buckets: Buckets | None = None) -> None:
        self.target, self.vocab, self.rule = target, vocab, rule
        self.buckets = Buckets() if buckets is None else buckets
        self.constants = lru_cache(maxsize=8)(_constants)

    def run(self, rows: Rows, proposals: Proposals, sampling: SamplingBatch) -> tuple[Tensor, Accepted]:
        """`rows` are those of `proposals.nodes`."""
        lowered = None
        if self.target.binds and not sampling.window and not any(sampling.rejection):
            sizes = {**bucket(rows), **sampling.param_widths}
            lowered = self.buckets.lowered("verify", lambda: self.program, sizes)
        if lowered is None:
            logits = self.target.forward(rows)
            return logits, accept(proposals, logits, sampling, self.vocab, self.rule)
        constants = self.constants(proposals.nodes, sampling)
        lowered.write((rows.positions + np.int32(1), *constants, *inputs_of(rows)))
        lowered.replay()
        return lowered.results[0], told(proposals, *(found.tolist() for found in lowered.outputs[1:]))

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

        return optimized(trace(verify, self.target.kv.storage.device))


def _constants(nodes: Nodes, sampling: SamplingBatch) -> tuple[NDArray[Any], ...]:
    """Inputs of the program that stay the same as long as the batch and the shapes do."""
    layout = nodes.layout
    noise = RowNoise.of(sampling, layout.seq_idx)
    given = nodes.parents, layout.depths, np.zeros_like(nodes.parents), noise.sample_idx, noise.seeds, noise.greedy
    return (*given, *sampling.param_arrays)
