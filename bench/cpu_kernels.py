"""Times the ops on the CPU beside torch, at the shapes of SmolLM2-135M and the packaged pair.

    python -m bench.cpu_kernels [--section linear,pass,attention,rows,sampling,launch,compile] [--model NAME,...]
                                [--rows 1,2,4,8,16] [--threads N] [--budget SECONDS] [--json FILE]

Both sides run in turn, so that a drift of the machine's speed hits them alike; numbers are medians. A ratio is torch's
time over ours. Weights come from a pool larger than the caches, and the share of bandwidth at one row is of what torch
reads, in the same turns, by whichever of its reductions is fastest here.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.parser import Parser
from lychee.compiler.static_check import parse_choice
from lychee.kernels.kernel import kernel
from lychee.nouns import counted

from . import cpu_compile
from .cpu_cases import (
    Case,
    Reader,
    attention_cases,
    linear_cases,
    make_pool,
    models,
    pass_cases,
    row_cases,
    sampling_cases,
)
from .rows import counts

SECTIONS = ("linear", "pass", "attention", "rows", "sampling", "launch", "compile")
VOCABS = (4096, 131072)
MOST_TURNS = 200


@dataclass(frozen=True)
class Timing:
    """Median seconds of one call by side; `ratio` is the fastest of torch's over ours."""

    section: str
    group: str
    label: str
    rows: int
    seconds: dict[str, float]
    ratio: float
    of_read: float | None  # share of the read bandwidth measured in the same turns


def in_turn(sides: dict[str, Callable[[], Any]], budget: float, least: int = 5) -> dict[str, float]:
    """Median seconds of each side; in every turn another side goes first."""
    for run in sides.values():
        run()
    taken: dict[str, list[float]] = {name: [] for name in sides}
    order, ends = list(sides), time.perf_counter() + budget
    for turn in range(MOST_TURNS):
        if turn >= least and time.perf_counter() > ends:
            break
        for name in order:
            started = time.perf_counter()
            sides[name]()
            taken[name].append(time.perf_counter() - started)
        order.append(order.pop(0))
    return {name: median(times) for name, times in taken.items()}


def timed(case: Case, budget: float) -> Timing:
    seconds = {name: taken / case.calls for name, taken in in_turn(dict(case.sides), budget).items()}
    torch_seconds = min(taken for name, taken in seconds.items() if name.startswith("torch"))
    of_read = seconds["read"] / seconds["ours"] if "read" in seconds else None
    return Timing(case.section, case.group, case.label, case.rows, seconds, torch_seconds / seconds["ours"], of_read)


def fastest_reader(pool: Tensor, budget: float) -> tuple[Reader, float]:
    """Of torch's ways to read a vector once the fastest, and its bytes per second."""
    readers: dict[str, Reader] = {
        "sum": torch.sum,
        "dot": lambda vector: torch.dot(vector, vector),
        "matrix times vector": lambda vector: _by_rows(vector, 1024) @ torch.ones(1024),
    }
    seconds = in_turn({name: partial(read, pool) for name, read in readers.items()}, budget, least=3)
    best = min(seconds, key=lambda name: seconds[name])
    return readers[best], pool.nbytes / seconds[best]


def _by_rows(vector: Tensor, width: int) -> Tensor:
    return vector[: len(vector) // width * width].view(-1, width)


def last_level_cache() -> int:
    """Bytes of the largest cache that the system reports; 0 where it reports none."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    found = [file.read_text().strip() for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) * units[size[-1]] for size in found if size[-1:] in units), default=0)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


@kernel
def _fourteen_arguments(a, b, c, d, e, f, g, h, k, l, m, n, o, p):  # noqa: E741
    pass


def launch_seconds(budget: float) -> dict[str, float]:
    """Median seconds of one launch that does nothing, of fourteen arguments: eight tensors, five integers, a float."""
    tensors, integers = [torch.zeros(1) for _ in range(8)], range(100, 105)

    def run() -> None:
        for _ in range(1000):
            _fourteen_arguments[(1,)](*tensors, *integers, 0.5)

    return {"14 arguments": in_turn({"launch": run}, budget)["launch"] / 1000}


def geometric_means(timings: Sequence[Timing]) -> dict[str, float]:
    """Of the ratios, by section and by section and group."""
    ratios: dict[str, list[float]] = {}
    for timing in timings:
        for name in (timing.section, f"{timing.section}, {timing.group}"):
            ratios.setdefault(name, []).append(timing.ratio)
    return {name: geometric_mean(values) for name, values in ratios.items()}


def show(console: Console, timings: Sequence[Timing]) -> None:
    """A table for each section and group: microseconds of ours and the ratio, by rows."""
    groups: dict[tuple[str, str], list[Timing]] = {}
    for timing in timings:
        groups.setdefault((timing.section, timing.group), []).append(timing)
    for (section, group), found in groups.items():
        console.print(f"\n{section}, {group}: geometric mean {geometric_mean([t.ratio for t in found]):.2f}")
        table = Table(box=None)
        table.add_column("us, torch / ours" + (", of bandwidth" if section == "pass" else "") + ", by rows")
        rows = sorted({timing.rows for timing in found})
        for heading in (*map(str, rows), *(["of bandwidth"] if section == "linear" else [])):
            table.add_column(heading, justify="right")
        for label in dict.fromkeys(timing.label for timing in found):
            by_rows = {timing.rows: timing for timing in found if timing.label == label}
            cells = [f"{by_rows[n].seconds['ours'] * 1e6:.1f} {by_rows[n].ratio:5.2f}" for n in rows]
            shares = [f"{t.of_read:.0%}" for t in by_rows.values() if t.of_read is not None]
            if section == "pass":
                cells, shares = [f"{cell} {share:>4}" for cell, share in zip(cells, shares, strict=True)], []
            table.add_row(label, *cells, *shares)
        console.print(table)


def show_compile(console: Console, cold: cpu_compile.Process, warm: cpu_compile.Process) -> None:
    console.print("\ncompiling, with an empty cache")
    table = Table(box=None)
    for heading in ("op", "kernel", "seconds"):
        table.add_column(heading, justify="right" if heading == "seconds" else "left")
    for one in cold.kernels:
        table.add_row(one.op, one.name, f"{one.seconds:.3f}")
    console.print(table)
    again = sum(not one.cached for one in warm.kernels)
    console.print(
        f"first calls of all ops: {sum(cold.first_calls.values()):.2f} s; in a second process "
        f"{sum(warm.first_calls.values()):.2f} s, {again} kernels compiled there"
    )


def cases(args: argparse.Namespace, pool: Tensor, reader: Reader) -> Iterator[Case]:
    for name, config in ((name, config) for name, config in models().items() if name in args.model):
        if "linear" in args.section:
            yield from linear_cases(name, config, args.rows, pool, reader)
        if "pass" in args.section:
            yield from pass_cases(name, config, args.rows, reader)
        if "attention" in args.section:
            yield from attention_cases(name, config, args.rows)
        if "rows" in args.section:
            yield from row_cases(name, config, args.rows)
    if "sampling" in args.section:
        yield from sampling_cases(args.vocab, args.rows)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    cache = last_level_cache()
    parser = Parser(__doc__)
    parser.add_argument("--section", type=parse_choice("--section", SECTIONS), default=list(SECTIONS))
    parser.add_argument("--model", type=parse_choice("--model", list(models())), default=list(models()))
    parser.add_argument("--rows", type=counts, default=[1, 2, 4, 8, 16], help="numbers of rows (default 1,2,4,8,16)")
    parser.add_argument("--vocab", type=counts, default=list(VOCABS), help="of sampling (default 4096,131072)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--budget", type=float, default=0.5, help="seconds for each case (default 0.5), at least 5 turns"
    )
    parser.add_argument(
        "--pool",
        type=int,
        metavar="MIB",
        default=max(240, min(2 * cache, 1 << 30) >> 20),
        help="weights to walk through (default twice the last cache, from 240 to 1024)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements there too")
    args = parser.parse_args(argv)
    if args.threads < 1 or args.pool < 1:
        parser.error(f"--threads is {args.threads} and --pool is {args.pool}, must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parsed(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    console = Console(width=None if sys.stdout.isatty() else 140)
    pool = make_pool(args.pool << 20)
    reader, bandwidth = fastest_reader(pool, args.budget)
    console.print(
        f"torch {torch.__version__}, {counted(args.threads, 'thread')}, torch reads {bandwidth / 1e9:.1f} GB/s"
    )
    timings = [timed(case, args.budget) for case in cases(args, pool, reader)]
    record: dict[str, Any] = {"torch": torch.__version__, "threads": args.threads, "read_bytes_per_s": bandwidth}
    record |= {"timings": [asdict(timing) for timing in timings], "geometric_means": geometric_means(timings)}
    show(console, timings)
    for section in dict.fromkeys(timing.section for timing in timings):
        console.print(f"{section}: geometric mean {record['geometric_means'][section]:.2f}")
    if "launch" in args.section:
        record["launch_seconds"] = launch_seconds(args.budget)
        for name, seconds in record["launch_seconds"].items():
            console.print(f"launch, {name}: {seconds * 1e6:.2f} us")
    if "compile" in args.section:
        cold, warm = cpu_compile.measure()
        record["compile"] = {"cold": asdict(cold), "warm": asdict(warm)}
        show_compile(console, cold, warm)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
