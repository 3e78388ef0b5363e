"""Times every op against its own roofline: `python -m bench.ops [--op NAME,...] [--dtype NAME,...] [--json FILE]`.

The device's read bandwidth and matrix throughput are measured first; an op's floor is the larger of its bytes over the
one and its flops over the other. On CUDA the kernels are timed with events, each run with a cold L2. On the CPU it is
what CPU dispatch runs, and inputs that fit the cache may beat a floor that counts memory traffic.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.parser import Parser
from lychee.compiler.cost import Peaks, measure_peaks
from lychee.compiler.static_check import parse_choice, parse_sizes
from lychee.kernels import OPS, Op
from lychee.kernels.aot import DTYPES

FLUSHED_BYTES = 256 << 20  # more than any GPU's L2


@dataclass(frozen=True)
class Timing:
    op: str
    dtype: str
    sizes: dict[str, int]
    seconds: float  # median
    floor_seconds: float
    bytes_per_s: float
    flops_per_s: float
    of_roofline: float


def run_seconds(call: Callable[[], Any], device: str, budget: float) -> list[float]:
    """Seconds of each of as many runs as fit in `budget`, at least 3 and at most 100, after a warm-up run."""
    call()
    measure = _cuda_seconds if device == "cuda" else _cpu_seconds
    runs: list[float] = []
    started = time.perf_counter()
    while len(runs) < 3 or (len(runs) < 100 and time.perf_counter() - started < budget):
        runs.append(measure(call))
    return runs


def _cpu_seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _cuda_seconds(call: Callable[[], Any]) -> float:
    """One run on the device's clock; overwriting the cache first also hides the time that the host takes to launch."""
    torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda").zero_()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def measure_peak(device: str, dtypes: Sequence[str], budget: float) -> Peaks:
    """Of more memory than the caches hold, and of matrices that fill the device."""
    pool, side = (1 << 30, 8192) if device == "cuda" else (1 << 27, 1024)
    return measure_peaks(
        [DTYPES[d] for d in dtypes], lambda call: min(run_seconds(call, device, budget)), device, pool, side
    )


def prepared(op: Op[Any, Any], arguments: dict[str, Any], device: str) -> Callable[[], Any]:
    """One call of the op with nothing left to allocate on CUDA."""
    if device != "cuda":
        return lambda: op(**arguments)
    binding = op.contract.check(arguments)
    outputs = [torch.empty(binding.shape(s), dtype=binding.dtype(s), device=device) for s in op.contract.outputs]
    extra = op.scratch(**arguments) if op.scratch else {}
    scratch = [b and torch.empty(b[0], dtype=b[1], device=device) for b in extra.values()]
    return lambda: op.launch(*outputs, *scratch, **arguments)


def time_op(op: Op[Any, Any], dtype: str, sizes: Mapping[str, int], device: str, peak: Peaks, budget: float) -> Timing:
    """The op at its typical sizes, replaced by `sizes` where it takes them."""
    torch.manual_seed(0)
    used = {**op.typical, **{axis: size for axis, size in sizes.items() if axis in op.axes}}
    arguments = op.contract.arguments((), op.sample(DTYPES[dtype], device, **used))
    cost = op.cost(**arguments)
    seconds = statistics.median(run_seconds(prepared(op, arguments, device), device, budget))
    floor = peak.floor(cost, dtype)
    return Timing(op.name, dtype, used, seconds, floor, cost.bytes / seconds, cost.flops / seconds, floor / seconds)


def show(peak: Peaks, timings: Sequence[Timing]) -> None:
    throughput = ", ".join(f"{dtype} {flops / 1e12:.2f} TFLOP/s" for dtype, flops in peak.flops_per_s.items())
    table = Table(title=f"{peak.device}: {peak.bytes_per_s / 1e9:.1f} GB/s, {throughput}")
    table.add_column("op", min_width=max(len(t.op) for t in timings))
    table.add_column("dtype", min_width=max(len(t.dtype) for t in timings))
    for heading in ("time (us)", "floor (us)", "GB/s", "GFLOP/s", "% roof"):
        table.add_column(heading, justify="right")
    for t in timings:
        numbers = (
            t.seconds * 1e6,
            t.floor_seconds * 1e6,
            t.bytes_per_s / 1e9,
            t.flops_per_s / 1e9,
            t.of_roofline * 100,
        )
        table.add_row(t.op, t.dtype, *(f"{number:.1f}" for number in numbers))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--op", type=parse_choice("--op", list(OPS)), default=list(OPS))
    parser.add_argument("--dtype", type=parse_choice("--dtype", list(DTYPES)))
    parser.add_argument("--size", type=parse_sizes, default={}, help="AXIS=NUMBER,... in place of the typical sizes")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds to spend on each median")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements there too")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = args.dtype or (["bfloat16"] if device == "cuda" else ["float32"])
    peak = measure_peak(device, dtypes, args.budget)
    timings = [time_op(OPS[n], d, args.size, device, peak, args.budget) for n in args.op for d in dtypes]
    show(peak, timings)
    if args.json:
        record = {"torch": torch.__version__, "peak": asdict(peak), "timings": [asdict(t) for t in timings]}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
