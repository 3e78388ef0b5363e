"""Batch: the rows of one forward pass, ragged over sequences, built on the host from lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lychee.kernels.types import I32, Ancestors, Paging, Positions, SlotMapping, Spec, TokenIds

Ints = NDArray[np.int32]
LogitRows = Annotated[Tensor, Spec("num_logit_rows", I32, "row of the batch")]


@dataclass(frozen=True)
class Batch:
    """Rows with their paging. Trees in decode, chunks of prompts in prefill; never both.

    `logit_rows` None asks for the logits of every row.
    """

    tokens: TokenIds
    positions: Positions
    slot_mapping: SlotMapping
    paging: Paging
    ancestors: Ancestors | None
    logit_rows: LogitRows | None

    @property
    def is_decode(self) -> bool:
        return self.ancestors is not None

    @classmethod
    def prefill(
        cls,
        tokens: Sequence[Sequence[int]],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | str = "cpu",
        logit_rows: Sequence[int] | None = None,
    ) -> Batch:
        """One chunk per sequence: row i is the token at position `context_len + i`, stored at that slot."""
        rows = _Rows.of(tokens, context_lens, block_tables, block_size)
        return rows.batch(rows.stored_at, None, torch.device(device), logit_rows)

    @classmethod
    def decode(
        cls,
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | str = "cpu",
        logit_rows: Sequence[int] | None = None,
    ) -> Batch:
        """One tree per sequence: row i is node i, at slot `context_len + i` and position `context_len + depth(i)`.

        A chain is the tree whose parents are -1, 0, 1, ...; one node is plain decoding. Raises ValueError where a tree
        does not start with parent -1 or names a parent that does not come before its child.
        """
        rows = _Rows.of(tokens, context_lens, block_tables, block_size)
        ancestors, depths = _ancestors(_flat(parents), rows)
        return rows.batch(rows.context_lens[rows.seq_idx] + depths, ancestors, torch.device(device), logit_rows)


@dataclass(frozen=True)
class _Rows:
    """Host arrays of a batch. `stored_at` is each row's place in its sequence: context_len plus its local index."""

    tokens: Ints
    cu_seqlens_q: Ints
    seq_idx: Ints
    local: Ints
    context_lens: Ints
    stored_at: Ints
    block_tables: Ints
    block_size: int
    max_rows: int
    max_context: int

    @classmethod
    def of(
        cls,
        tokens: Sequence[Sequence[int]],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
    ) -> _Rows:
        counts, lens = [len(row) for row in tokens], np.array(context_lens, np.int32)
        if max(counts) == 1 == min(counts):
            cu_seqlens_q = np.arange(len(counts) + 1, dtype=np.int32)
            seq_idx, local, stored_at = cu_seqlens_q[:-1], np.zeros(len(counts), np.int32), lens
        else:
            cu_seqlens_q = np.array([0, *accumulate(counts)], np.int32)
            seq_idx = np.arange(len(counts), dtype=np.int32).repeat(counts)
            local = np.arange(cu_seqlens_q[-1], dtype=np.int32) - cu_seqlens_q[seq_idx]
            stored_at = lens[seq_idx] + local
        # The pad is never read; block 0 keeps even a stray address inside the cache.
        tables = np.zeros((len(counts), max(map(len, block_tables))), np.int32)
        for seq, blocks in enumerate(block_tables):
            tables[seq, : len(blocks)] = blocks
            if (needed := context_lens[seq] + counts[seq]) > len(blocks) * block_size:
                raise ValueError(
                    f"block_tables[{seq}] has {len(blocks)} blocks of {block_size} slots, {needed} slots are needed"
                )
        return cls(
            _flat(tokens),
            cu_seqlens_q,
            seq_idx,
            local,
            lens,
            stored_at,
            tables,
            block_size,
            max_rows=max(counts),
            max_context=max(context_lens),
        )

    def batch(
        self, positions: Ints, ancestors: Ints | None, device: torch.device, logit_rows: Sequence[int] | None
    ) -> Batch:
        def tensor(array: Ints) -> Tensor:
            return on_device(array, device)

        nth = self.stored_at // self.block_size
        # block * block_size + stored_at % block_size, rearranged
        slots = (self.block_tables[self.seq_idx, nth] - nth) * self.block_size + self.stored_at
        return Batch(
            tokens=tensor(self.tokens),
            positions=tensor(positions),
            slot_mapping=tensor(slots),
            paging=Paging(
                cu_seqlens_q=tensor(self.cu_seqlens_q),
                seq_idx=tensor(self.seq_idx),
                context_lens=tensor(self.context_lens),
                block_tables=tensor(self.block_tables),
                block_size=self.block_size,
                max_rows=self.max_rows,
                max_context=self.max_context,
            ),
            ancestors=None if ancestors is None else tensor(ancestors),
            logit_rows=None if logit_rows is None else tensor(np.array(logit_rows, np.int32)),
        )


def on_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor; on the CPU they share memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device)


def _flat(values: Sequence[Sequence[int]]) -> Ints:
    return np.fromiter(chain.from_iterable(values), np.int32)


def _ancestors(parents: Ints, rows: _Rows) -> tuple[Ints, Ints]:
    """Each row's path by depth, itself last and -1 past it [num_tokens, max_path], and its depth [num_tokens]."""
    local, num_rows = rows.local, len(rows.local)
    if rows.max_rows == 1 and len(parents) == num_rows and (parents == -1).all():
        return np.zeros((num_rows, 1), np.int32), local
    if len(parents) == num_rows and (parents == local - 1).all():  # chains: a row's path is all rows up to it
        by_depth = np.arange(rows.max_rows, dtype=np.int32)
        return np.where(by_depth <= local[:, None], by_depth, np.int32(-1)), local
    if len(parents) != num_rows or not np.all(np.where(local == 0, parents == -1, (parents >= 0) & (parents < local))):
        raise ValueError("parents must give -1 for each tree's first node and an earlier node for every other")
    starts = rows.cu_seqlens_q[rows.seq_idx]
    climbed = [local]  # by steps up from the row; -1 above the root
    while (climbed[-1] > 0).any():
        climbed.append(np.where(climbed[-1] > 0, parents[starts + climbed[-1]], np.int32(-1)))
    upward = np.stack(climbed, axis=1)
    depths = (upward >= 0).sum(axis=1, dtype=np.int32) - np.int32(1)
    steps_up = depths[:, None] - np.arange(len(climbed), dtype=np.int32)
    ancestors = upward[np.arange(num_rows)[:, None], np.maximum(steps_up, 0)]
    return np.where(steps_up >= 0, ancestors, np.int32(-1)), depths
