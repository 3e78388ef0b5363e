"""A model's forward pass over one KV cache: on the CPU, decode batches replay launches that were bound before."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from lychee.compiler import Buckets, Program, Sizes, Tracer, trace
from lychee.kernels.kernel import can_bind
from lychee.kernels.sizes import next_power_of_2
from lychee.kernels.types import Logits

from .batch import Batch
from .kv_cache import KVCache
from .llama import Llama

LEAST_CONTEXT = 256
"""Contexts up to this long are one bucket, then those up to twice as long, and so on."""


class CompiledLlama:
    """`forward` gives what `Llama.forward` gives, to the bit. Its logits last until the next call."""

    def __init__(self, model: Llama, kv: KVCache, buckets: Buckets | None = None) -> None:
        self.model, self.kv = model, kv
        self.binds = can_bind(kv.storage.device)
        self.buckets = buckets or Buckets()

    def forward(self, batch: Batch) -> Logits:
        """Logits of `batch.logit_rows`, or of every row; stores the keys and values of all rows."""
        no_logits = batch.logit_rows is not None and len(batch.logit_rows) == 0
        if not self.binds or not batch.is_decode or no_logits:
            return self.model.forward(batch, self.kv)
        whole = batch.logit_rows is None
        lowered = self.buckets.lowered(whole, lambda: self.every_row if whole else self.some_rows, bucket(batch))
        if lowered is None:
            return self.model.forward(batch, self.kv)
        fill(lowered.inputs, batch)
        lowered.replay()
        return lowered.results[0]

    @cached_property
    def every_row(self) -> Program:
        """The pass that gives the logits of all rows."""
        return trace(lambda tracer: self.traced(tracer, logit_rows=None), self.kv.storage.device)

    @cached_property
    def some_rows(self) -> Program:
        """The pass that gives the logits of `Batch.logit_rows`."""
        return trace(self.traced, self.kv.storage.device)

    def traced(self, tracer: Tracer, **known: Any) -> Logits:
        """The logits of a batch that is the program's input."""
        return self.model.forward(tracer.struct(Batch, block_size=self.kv.block_size, **known), self.kv)


def bucket(batch: Batch, further: int = 0) -> Sizes:
    """The sizes of a decode pass, those that may be larger than the batch's rounded up, so that they seldom change.

    `further`: positions that contexts will grow by.
    """
    paging, ancestors = batch.paging, batch.ancestors
    assert ancestors is not None
    room = next_power_of_2(max(LEAST_CONTEXT, paging.max_context + further))
    num_blocks = max(paging.block_tables.shape[1], LEAST_CONTEXT // paging.block_size)
    return {
        "num_tokens": len(batch.tokens),
        "num_seqs": len(paging.context_lens),
        "max_path": ancestors.shape[1],
        "max_rows": paging.max_rows,
        "max_blocks": next_power_of_2(num_blocks),
        "max_context": room,
        "num_logit_rows": 0 if batch.logit_rows is None else len(batch.logit_rows),
    }


def fill(places: Sequence[Tensor], batch: Batch) -> None:
    """Write a batch into the inputs that a program has for one. Its block tables may be narrower than theirs."""
    paging = batch.paging
    tables = paging.cu_seqlens_q, paging.seq_idx, paging.context_lens, paging.block_tables
    given = batch.tokens, batch.positions, batch.slot_mapping, *tables, batch.ancestors, batch.logit_rows
    for place, tensor in zip(places, (t for t in given if t is not None), strict=True):
        (place if place.shape == tensor.shape else place[:, : tensor.shape[1]]).copy_(tensor)
