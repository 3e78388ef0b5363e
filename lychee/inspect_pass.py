"""A model's decode pass, call by call: what each costs, the least time it can take here, and the time it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .compiler import lower
from .compiler.cost import Peaks, costs, measure_peaks
from .compiler.profile import fastest, profile
from .kernels.types import Cost
from .models.compiled import CompiledLlama, bucket, inputs_of
from .models.constant_names import constant_names
from .models.kv_cache import KVCache
from .models.layout import Rows
from .models.llama import Llama

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Line:
    """Calls and what they cost together; `floor` and `seconds` (None: not measured) are seconds."""

    op: str
    text: str
    calls: int
    cost: Cost
    floor: float
    seconds: float | None

    @staticmethod
    def sum(op: str, lines: Sequence[Line]) -> Line:
        measured = [line.seconds for line in lines if line.seconds is not None]
        return Line(
            op,
            "",
            sum(line.calls for line in lines),
            Cost(sum(line.cost.flops for line in lines), sum(line.cost.bytes for line in lines)),
            sum(line.floor for line in lines),
            sum(measured) if measured else None,
        )


@dataclass(frozen=True)
class Pass:
    """`replay`: measured seconds of the pass replayed as one, None where nothing was measured."""

    peaks: Peaks
    header: str
    lines: tuple[Line, ...]
    replay: float | None

    @property
    def by_op(self) -> list[Line]:
        """A line for each op: that which takes most time first, or where none was measured has the highest floor."""
        ops = dict.fromkeys(line.op for line in self.lines)
        sums = [Line.sum(op, [line for line in self.lines if line.op == op]) for op in ops]
        return sorted(sums, key=lambda line: line.floor if line.seconds is None else line.seconds, reverse=True)

    @property
    def total(self) -> Line:
        return Line.sum("all", self.lines)


@dataclass(frozen=True)
class Effort:
    """What is spent on measuring. `pool_bytes` must be more than the caches hold; 0 seconds time nothing but peaks."""

    seconds: float
    pool_bytes: int = 256 << 20
    side: int = 1024


def inspect_pass(model: Llama, rows: int, context: int, kv_dtype: torch.dtype, effort: Effort) -> Pass:
    """The pass of a chain of `rows` nodes of one sequence, `context` tokens cached before it, on the CPU."""
    num_blocks = -(-(context + rows) // BLOCK_SIZE)
    kv = KVCache.allocate(model.config, num_blocks, BLOCK_SIZE, kv_dtype, "cpu")
    kv.storage.zero_()
    chain = [list(range(-1, rows - 1))]
    given = Rows.decode([[0] * rows], chain, [context], [list(range(num_blocks))], BLOCK_SIZE)
    program, sizes = CompiledLlama(model, kv).every_row, bucket(given)
    lowered = lower(program, sizes)
    lowered.write(inputs_of(given))
    dtype = model.weights.dtype
    peaks = measure_peaks([dtype], fastest, "cpu", effort.pool_bytes, effort.side)
    timed = profile(lowered, effort.seconds, effort.pool_bytes) if effort.seconds else None
    keys = program.keys(constant_names(model, kv))
    lines = []
    for at, (call, cost) in enumerate(zip(program.calls, costs(program, sizes, lowered.inputs), strict=True)):
        floor = peaks.floor(cost, str(dtype).removeprefix("torch."))
        lines.append(Line(call.op.name, call.text(keys), 1, cost, floor, None if timed is None else timed.calls[at]))
    inputs = ", ".join(f"{value}: {value.typed}" for value in program.inputs)
    return Pass(peaks, f"({inputs})", tuple(lines), None if timed is None else timed.replay)
