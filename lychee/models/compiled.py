"""A model's forward pass over one KV cache: on the CPU, decode batches replay launches that were bound before."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lychee.compiler import Buckets, Program, Tracer, optimized, trace
from lychee.kernels.kernel import can_bind
from lychee.kernels.sizes import next_power_of_2
from lychee.kernels.types import Logits

from .batch import Batch
from .kv_cache import KVCache
from .layout import Layout, Rows, ints
from .llama import Llama

LEAST_CONTEXT = 256
"""Contexts up to this long are one bucket, then those up to twice as long, and so on."""
SHORT, SHORT_STEP = 64, 8
"""Rows of a prefill that runs as decoding, and of what its rows are a multiple there."""


class CompiledLlama:
    """`forward` gives what `Llama.forward` gives, to the bit. Its logits last until the next call."""

    def __init__(self, model: Llama, kv: KVCache, buckets: Buckets | None = None) -> None:
        self.model, self.kv = model, kv
        self.binds = can_bind(kv.storage.device)
        self.buckets = Buckets() if buckets is None else buckets

    def forward(self, rows: Rows) -> Logits:
        """Logits of `rows.logit_rows`, or of every row; stores the keys and values of all rows."""
        found = None
        if self.binds and rows.layout.ancestors is None:
            found = self._short_prefill(rows)
        elif self.binds and (rows.logit_rows is None or len(rows.logit_rows)):
            found = self._replayed(rows)
        return self.model.forward(Batch.of(rows, self.kv.storage.device), self.kv) if found is None else found

    def _replayed(self, rows: Rows) -> Logits | None:
        whole = rows.logit_rows is None
        program = self.every_row if whole else self.some_rows
        lowered = self.buckets.lowered(whole, lambda: program, bucket(rows))
        if lowered is None:
            return None
        lowered.write(inputs_of(rows))
        lowered.replay()
        return lowered.results[0]

    def _short_prefill(self, rows: Rows) -> Logits | None:
        """A short prompt as a chain of nodes: on the CPU the same bits. Op by op it would mostly be Python."""
        count = len(rows.tokens)
        if len(rows.context_lens) > 1 or count > SHORT or rows.logit_rows is None:
            return None
        asked = len(rows.logit_rows)
        if not asked:  # the keys and values alone
            rows = replace(rows, logit_rows=ints([count - 1]))
        logits = self._replayed(chain_of(rows, -(-count // SHORT_STEP) * SHORT_STEP))
        return None if logits is None else logits[:asked]

    @cached_property
    def every_row(self) -> Program:
        """The pass that gives the logits of all rows."""
        return optimized(trace(lambda tracer: self.traced(tracer, logit_rows=None), self.kv.storage.device))

    @cached_property
    def some_rows(self) -> Program:
        """The pass that gives the logits of `Batch.logit_rows`."""
        return optimized(trace(self.traced, self.kv.storage.device))

    def traced(self, tracer: Tracer, **known: Any) -> Logits:
        """The logits of a batch that is the program's input."""
        return self.model.forward(tracer.struct(Batch, block_size=self.kv.block_size, **known), self.kv)


def chain_of(rows: Rows, num_rows: int) -> Rows:
    """A chunk of one prompt as a chain of nodes, the last repeated to make `num_rows`. Repetitions store nothing."""
    count = len(rows.tokens)
    at = np.minimum(np.arange(num_rows), count - 1)
    slots = np.where(np.arange(num_rows) < count, rows.slots[at], np.int32(-1))
    layout = _chain(count, num_rows)
    return replace(rows, layout=layout, tokens=rows.tokens[at], positions=rows.positions[at], slots=slots)


@lru_cache(maxsize=64)
def _chain(count: int, num_rows: int) -> Layout:
    one = Layout.trees((tuple(range(-1, count - 1)),))
    assert one.ancestors is not None
    at = np.minimum(np.arange(num_rows), count - 1)
    ancestors = np.pad(one.ancestors[at], ((0, 0), (0, num_rows - count)), constant_values=-1)
    return Layout(one.seq_idx[at], one.nodes[at], one.depths[at], ancestors, ints([0, num_rows]), num_rows)


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
