"""Drafting trees as one program: all passes and draws of a round replayed by one native call.

The only thing that a pass takes from the one before it is the tokens drawn, and those stay in the program's memory.
What else it reads (positions, slots, noise counters) is known when the round begins and written for all levels at once.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lychee.compiler import Buckets, Program, Size, Tracer, optimized, trace
from lychee.kernels import confidence, draw, process_logits, take_tokens
from lychee.kernels.kernel import can_bind
from lychee.kernels.philox import DRAFT, TARGET
from lychee.kernels.types import NoiseKeys, Paging, SamplingRows, SamplingTensors
from lychee.models.batch import Batch
from lychee.models.compiled import context_bucket
from lychee.models.kv_cache import KVCache
from lychee.models.layout import Ints, Rows, ints
from lychee.models.llama import Llama

from .inputs import RowNoise, SamplingBatch
from .nodes import Segment

T = TypeVar("T")
SEQS = Size("num_seqs")


@dataclass(frozen=True)
class Drawn:
    """The draws of a segment, level by level and row by row.

    log_probs: under rejection, what those of each level are from, until the next segment is drafted.
    confidences: where they are asked for, of each level's rows; of the first row alone, if there is one sequence.
    """

    tokens: Ints
    log_probs: Seq[Tensor]
    confidences: Seq[Ints] = ()


class DraftLoop:
    """The captured loop of a draft model, for each kind of trees and number of sequences that comes again."""

    def __init__(self, model: Llama, kv: KVCache, vocab: int, buckets: Buckets | None = None) -> None:
        self.model, self.kv, self.vocab = model, kv, vocab
        self.binds = can_bind(kv.storage.device)
        self.buckets = Buckets() if buckets is None else buckets
        self.program = lru_cache(maxsize=64)(self._program)
        self.constants = lru_cache(maxsize=8)(_constants)  # it keeps batches alive

    def run(
        self, batch: SamplingBatch, active: tuple[int, ...], segment: Segment, tokens: Ints, confident: bool
    ) -> Drawn | None:
        """Draft a segment of a tree for each of the sequences `active`. tokens: of its first level's rows.

        None where it has to be drafted level by level. That is with penalties and bad words, which look at tokens that
        the host does not know yet, and for requests of both kinds of noise, because noise is of one stream.
        """
        own = {batch.rejection[i] for i in active}
        if not self.binds or batch.window or len(own) > 1:
            return None
        seqs, rejection = [batch.seqs[i] for i in active], own.pop()
        roots = ints([seq.cached for seq in seqs])
        rows = Rows.of(segment.rows, tokens, roots - 1, [seq.blocks for seq in seqs], self.kv.block_size)
        frontier, depth = segment.frontier, len(segment.levels)
        sizes = {
            "num_seqs": len(seqs),
            **context_bucket(rows.max_context, rows.block_tables.shape[1], self.kv.block_size),
            **batch.param_widths,
            "num_params": len(batch.seqs),
            "num_rows": len(segment.rows.nodes),
            "num_drawn": len(frontier.nodes),
            "window": 1,
        }
        name = segment.key, segment.first, rejection, confident, len(seqs) == 1
        lowered = self.buckets.lowered(name, lambda: self.program(*name), sizes)
        if lowered is None:
            return None
        root_at = roots[frontier.seq_idx]
        at = root_at + frontier.depths
        places = rows.tokens, rows.positions, rows.slots, rows.context_lens, rows.block_tables
        constant = self.constants(batch, active, segment, rejection)
        lowered.write((*places, constant.seqs, at, *constant.rows, root_at if rejection else at + 1, *constant.others))
        lowered.replay()
        drawn = np.concatenate([level.ravel() for level in lowered.outputs[:depth]])
        sure = tuple(lowered.outputs[depth : 2 * depth]) if confident else ()
        return Drawn(drawn, lowered.results[depth + len(sure) :], sure)

    def _program(
        self, levels: tuple[tuple[int, ...], ...], first_depth: int, rejection: bool, confident: bool, alone: bool
    ) -> Program:
        """levels, first_depth: a Segment's key and `first`. alone: there is one sequence."""

        def loop(tracer: Tracer) -> tuple[Tensor, ...]:
            def numbers(name: str, *shape: int | Size) -> Tensor:
                return tracer.tensor(name, shape, torch.int32)

            tokens = numbers("tokens", levels[0][1])
            positions, slots = numbers("positions", Size("num_rows")), numbers("slots", Size("num_rows"))
            context_lens, tables = numbers("context_lens", SEQS), numbers("block_tables", SEQS, Size("max_blocks"))
            longest: Any = Size("max_context")
            every = tracer.struct(SamplingRows, {"num_rows": "num_drawn"})
            every_key = tracer.struct(NoiseKeys, {"num_rows": "num_drawn"})
            params = tracer.struct(SamplingTensors, {"num_seqs": "num_params"}, token_counts=None)
            drawn: list[Tensor] = []
            kept: list[Tensor] = []
            sure: list[Tensor] = []
            row = first = 0
            for depth, (num_drawn, num_rows, max_rows, num_children, takes_all) in enumerate(levels, first_depth):
                bounds, seq_idx = numbers(f"cu_seqlens_q_{depth}", SEQS + 1), numbers(f"seq_idx_{depth}", num_rows)
                ancestors = numbers(f"ancestors_{depth}", num_rows, depth + 2)
                logit_rows = None if depth else numbers("logit_rows", num_drawn)
                if drawn and takes_all:
                    tokens = drawn[-1].flatten()
                elif drawn:
                    tokens = take_tokens(drawn[-1], numbers(f"token_from_{depth}", num_rows))
                paging = Paging(bounds, seq_idx, context_lens, tables, self.kv.block_size, max_rows, longest)
                where = positions.narrow(0, row, num_rows), slots.narrow(0, row, num_rows)
                logits = self.model.forward(Batch(tokens, *where, paging, ancestors, logit_rows), self.kv)
                if confident:
                    sure.append(confidence(logits.narrow(0, 0, 1) if alone else logits, self.vocab))
                kept.append(process_logits(logits, part(every, first, num_drawn), params, self.vocab))
                keys = part(every_key, first, num_drawn)
                drawn.append(draw(kept[-1], keys, num_children, DRAFT if rejection else TARGET, False))
                row, first = row + num_rows, first + num_drawn
            return (*drawn, *sure, *kept) if rejection else (*drawn, *sure)

        return optimized(trace(loop, self.kv.storage.device))


def part(struct: T, first: int, length: int) -> T:
    """Some rows of a struct of tensors."""
    tensors = {f.name: getattr(struct, f.name).narrow(0, first, length) for f in fields(struct)}  # type: ignore[arg-type]
    return replace(struct, **tensors)  # type: ignore[type-var]


@dataclass(frozen=True)
class Constants:
    """Inputs of the program that stay the same as long as the batch and the plan do: between those that do not."""

    seqs: Ints
    rows: tuple[NDArray[Any], ...]
    others: tuple[NDArray[Any], ...]


def _constants(batch: SamplingBatch, active: tuple[int, ...], segment: Segment, rejection: bool) -> Constants:
    frontier = segment.frontier
    noise = RowNoise.of(batch, ints(active)[frontier.seq_idx])
    nodes = frontier.nodes if rejection else np.zeros_like(frontier.nodes)
    others: list[NDArray[Any]] = [nodes, noise.sample_idx, noise.greedy, *batch.param_arrays]
    for nth, level in enumerate(segment.levels):
        given = level.rows.cu_seqlens_q, level.rows.seq_idx, level.rows.ancestors, level.logit_rows
        others += [array for array in given if array is not None]
        if nth and level.token_from is not None and not level.takes_all:
            others.append(level.token_from)
    recent = np.zeros((len(nodes), 1), np.int32)
    return Constants(noise.indices, (frontier.depths, recent, noise.seeds), tuple(others))
