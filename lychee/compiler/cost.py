"""What calls of a program cost at given sizes: flops, bytes, and the least time that a device's peaks allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lychee.kernels.types import Cost
from lychee.nouns import counted

from .lower import shaped
from .program import Program
from .sizes import Sizes


@dataclass(frozen=True)
class Peaks:
    """What a device was measured to do, and how many threads or which device did it."""

    device: str
    bytes_per_s: float
    flops_per_s: dict[str, float]  # by dtype, `float32`

    def floor(self, cost: Cost, dtype: str) -> float:
        """Seconds that the roofline allows at best: the larger of its bytes' and its flops' time."""
        return max(cost.bytes / self.bytes_per_s, cost.flops / self.flops_per_s[dtype])


def costs(program: Program, sizes: Sizes, inputs: Sequence[Tensor]) -> list[Cost]:
    """Of each call. `inputs` are the program's, with their elements: what attention reads depends on them."""
    arguments = shaped(program, sizes, dict(zip(program.inputs, inputs, strict=True)))
    return [call.op.cost(**arguments.of(call.arguments)) for call in program.calls]


def measure_peaks(
    dtypes: Iterable[torch.dtype],
    timed: Callable[[Callable[[], object]], float],
    device: str,
    pool_bytes: int,
    side: int,
) -> Peaks:
    """The fastest of torch's ways to read `pool_bytes` once, and to multiply square matrices of `side` in each dtype.

    `timed` gives the seconds of the fastest of some runs. Copies count too: bytes read and bytes written.
    """
    pool = torch.ones(pool_bytes // 4, device=device)
    rows, ones = pool[: len(pool) // 1024 * 1024].view(-1, 1024), torch.ones(1024, device=device)
    target = torch.empty_like(pool)
    ways: list[tuple[int, Callable[[], object]]] = [
        (1, lambda: torch.sum(pool)),
        (1, lambda: torch.dot(pool, pool)),
        (1, lambda: rows @ ones),
        (2, lambda: target.copy_(pool)),
    ]
    bytes_per_s = max(times * pool.nbytes / timed(way) for times, way in ways)
    flops_per_s = {}
    for dtype in dtypes:
        matrix = torch.ones(side, side, dtype=dtype, device=device)
        product = torch.empty_like(matrix)
        flops_per_s[str(dtype).removeprefix("torch.")] = 2 * side**3 / timed(_multiply(matrix, product))
    title = f"CPU, {counted(torch.get_num_threads(), 'thread')}"
    if device.partition(":")[0] == "cuda":
        title = torch.cuda.get_device_name(device)
    return Peaks(title, bytes_per_s, flops_per_s)


def _multiply(matrix: Tensor, product: Tensor) -> Callable[[], object]:
    return lambda: torch.mm(matrix, matrix, out=product)
