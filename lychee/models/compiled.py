"""A model's forward pass over one KV cache: on the CPU, decode batches replay launches that were bound before."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from numpy.typing import NDArray

from lychee.compiler import Buckets, Program, Tracer, trace
from lychee.kernels.kernel import can_bind
from lychee.kernels.sizes import next_power_of_2
from lychee.kernels.types import Logits

from .batch import Batch
from .kv_cache import KVCache
from .layout import Rows
from .llama import Llama

LEAST_CONTEXT = 256
"""Contexts up to this long are one bucket, then those up to twice as long, and so on."""


class CompiledLlama:
    """`forward` gives what `Llama.forward` gives, to the bit. Its logits last until the next call."""

    def __init__(self, model: Llama, kv: KVCache, buckets: Buckets | None = None) -> None:
        self.model, self.kv = model, kv
        self.binds = can_bind(kv.storage.device)
        self.buckets = buckets or Buckets()

    def forward(self, rows: Rows) -> Logits:
        """Logits of `rows.logit_rows`, or of every row; stores the keys and values of all rows."""
        whole = rows.logit_rows is None
        lowered = None
        if self.binds and rows.layout.ancestors is not None and (rows.logit_rows is None or len(rows.logit_rows)):
            program = self.every_row if whole else self.some_rows
            lowered = self.buckets.lowered(whole, lambda: program, bucket(rows))
        if lowered is None:
            return self.model.forward(Batch.of(rows, self.kv.storage.device), self.kv)
        lowered.write(inputs_of(rows))
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


def bucket(rows: Rows) -> dict[str, int]:
    """The sizes of a decode pass, those that may be larger than the batch's rounded up, so that they seldom change."""
    layout, num_blocks = rows.layout, rows.block_tables.shape[1]
    assert layout.ancestors is not None
    return {
        "num_tokens": len(rows.tokens),
        "num_seqs": len(rows.context_lens),
        "max_path": layout.ancestors.shape[1],
        "max_rows": layout.max_rows,
        **context_bucket(rows.max_context, num_blocks, rows.block_size),
        "num_logit_rows": 0 if rows.logit_rows is None else len(rows.logit_rows),
    }


def context_bucket(max_context: int, num_blocks: int, block_size: int) -> dict[str, int]:
    """The sizes that grow with contexts."""
    return {
        "max_blocks": next_power_of_2(max(num_blocks, LEAST_CONTEXT // block_size)),
        "max_context": next_power_of_2(max(LEAST_CONTEXT, max_context)),
    }


def inputs_of(rows: Rows) -> list[NDArray[Any]]:
    """What a program is to be given that has a Batch as input."""
    layout = rows.layout
    where = layout.cu_seqlens_q, layout.seq_idx, rows.context_lens, rows.block_tables
    given = rows.tokens, rows.positions, rows.slots, *where, layout.ancestors, rows.logit_rows
    return [array for array in given if array is not None]
