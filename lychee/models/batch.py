"""Batch: the rows of one forward pass, ragged over sequences, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lychee.kernels.types import I32, Ancestors, Paging, Positions, SlotMapping, Spec, TokenIds

from .layout import Rows

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
    def of(cls, rows: Rows, device: torch.device | str = "cpu") -> Batch:
        """The rows on a device; on the CPU they share the host's memory."""
        device = torch.device(device)

        def tensor(array: NDArray[np.int32]) -> Tensor:
            return on_device(array, device)

        layout = rows.layout
        return cls(
            tokens=tensor(rows.tokens),
            positions=tensor(rows.positions),
            slot_mapping=tensor(rows.slots),
            paging=Paging(
                cu_seqlens_q=tensor(layout.cu_seqlens_q),
                seq_idx=tensor(layout.seq_idx),
                context_lens=tensor(rows.context_lens),
                block_tables=tensor(rows.block_tables),
                block_size=rows.block_size,
                max_rows=layout.max_rows,
                max_context=rows.max_context,
            ),
            ancestors=None if layout.ancestors is None else tensor(layout.ancestors),
            logit_rows=None if rows.logit_rows is None else tensor(rows.logit_rows),
        )

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
        """`Rows.prefill` on a device."""
        return cls.of(Rows.prefill(tokens, context_lens, block_tables, block_size, logit_rows), device)

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
        """`Rows.decode` on a device."""
        return cls.of(Rows.decode(tokens, parents, context_lens, block_tables, block_size, logit_rows), device)


def on_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor; on the CPU they share memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device)
