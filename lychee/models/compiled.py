"""A model's forward pass over one KV cache: on the CPU, decode batches replay launches that were bound before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property

from torch import Tensor

from lychee.compiler import Lowered, Program, Sizes, lower, trace
from lychee.kernels.kernel import can_bind
from lychee.kernels.sizes import next_power_of_2
from lychee.kernels.types import Logits

from .batch import Batch
from .kv_cache import KVCache
from .llama import Llama

KEPT = 64
"""Lowered programs of a model; the one that was not used for longest goes first."""
AFTER = 4
"""Passes of a kind that run op by op: lowering takes as long as they lose by that."""
CONTEXT_STEP = 256


class CompiledLlama:
    """`forward` gives what `Llama.forward` gives, to the bit. Its logits last until the next call."""

    def __init__(self, model: Llama, kv: KVCache, after: int = AFTER) -> None:
        self.model, self.kv, self.after = model, kv, after
        self.binds = can_bind(kv.storage.device)
        self._arena: Tensor | None = None
        self._lowered: OrderedDict[tuple[int, ...], Lowered | int] = OrderedDict()

    def forward(self, batch: Batch) -> Logits:
        """Logits of `batch.logit_rows`, or of every row; stores the keys and values of all rows."""
        no_logits = batch.logit_rows is not None and len(batch.logit_rows) == 0
        can = self.binds and batch.is_decode and not no_logits
        if not can or (lowered := self._of(bucket(batch), batch.logit_rows is None)) is None:
            return self.model.forward(batch, self.kv)
        fill(lowered.inputs, batch)
        lowered.replay()
        return lowered.result

    def _of(self, sizes: Sizes, every_row: bool) -> Lowered | None:
        """The lowered pass of these sizes, None for the first few times."""
        key = tuple(sizes.values())
        found = self._lowered.pop(key, 0)
        if isinstance(found, int):
            found = found + 1 if found < self.after else self._lower(sizes, every_row)
        self._lowered[key] = found
        if len(self._lowered) > KEPT:
            self._lowered.popitem(last=False)
        return None if isinstance(found, int) else found

    def _lower(self, sizes: Sizes, every_row: bool) -> Lowered:
        lowered = lower(self.every_row if every_row else self.some_rows, sizes, self._arena)
        self._arena = lowered.arena
        return lowered

    @cached_property
    def every_row(self) -> Program:
        """The pass that gives the logits of all rows."""
        return self._traced(logit_rows=None)

    @cached_property
    def some_rows(self) -> Program:
        """The pass that gives the logits of `Batch.logit_rows`."""
        return self._traced()

    def _traced(self, **known: None) -> Program:
        def forward(batch: Batch) -> Logits:
            return self.model.forward(batch, self.kv)

        return trace(forward, Batch, self.kv.storage.device, block_size=self.kv.block_size, **known)


def bucket(batch: Batch) -> Sizes:
    """The sizes of a decode pass, those that may be larger than the batch's rounded up, so that they seldom change."""
    paging, ancestors = batch.paging, batch.ancestors
    assert ancestors is not None
    most, step = paging.max_context, CONTEXT_STEP
    return {
        "num_tokens": len(batch.tokens),
        "num_seqs": len(paging.context_lens),
        "max_path": ancestors.shape[1],
        "max_rows": paging.max_rows,
        "max_blocks": next_power_of_2(paging.block_tables.shape[1]),
        "max_context": max(64, next_power_of_2(most)) if 0 < most < step else -(-most // step) * step,
        "num_logit_rows": 0 if batch.logit_rows is None else len(batch.logit_rows),
    }


def fill(places: Sequence[Tensor], batch: Batch) -> None:
    """Write a batch into the inputs that a program has for one. Its block tables may be narrower than theirs."""
    paging = batch.paging
    tables = paging.cu_seqlens_q, paging.seq_idx, paging.context_lens, paging.block_tables
    given = batch.tokens, batch.positions, batch.slot_mapping, *tables, batch.ancestors, batch.logit_rows
    for place, tensor in zip(places, (t for t in given if t is not None), strict=True):
        (place if place.shape == tensor.shape else place[:, : tensor.shape[1]]).copy_(tensor)
