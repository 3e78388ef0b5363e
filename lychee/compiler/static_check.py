"""Compiles every op and shipped configuration for GPUs that need not be present, and holds the kernels to budgets.

    python -m lychee.compiler.static_check [--arch sm_80,sm_90] [--op NAME,...] [--dtype NAME,...]

A line for each kernel: registers and stack of a thread, shared memory of a block, occupancy, widths of the main loop's
loads, the instruction that multiplies matrices, and, for products, a thread's instructions for each weight.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from triton import knobs

from lychee.kernels import OPS
from lychee.kernels.aot import DTYPES, SHARED_LIMIT, Usage, compile_op, shaped_inputs

from .shipped import Configuration, broken_budgets, shipped

LINE = "{:<20} {:<24} {:<8} {:<6} {:>4} {:>5} {:>7} {:>5} {:>10} {:<24} {:>8}  {}"
HEADER = ("op", "kernel", "dtype", "arch", "regs", "stack", "shared", "occ.", "loads", "mma", "i/weight", "sizes")


def check(configurations: Sequence[Configuration], archs: Sequence[str]) -> Iterator[tuple[Configuration, Usage | str]]:
    """Each kernel of each configuration as it is compiled; a sentence in place of what could not be."""
    for configuration in configurations:
        op, dtype = OPS[configuration.op], configuration.dtype
        inputs = shaped_inputs(op, DTYPES[dtype], dict(configuration.sizes))
        for arch in archs:
            try:
                for usage in compile_op(op, inputs, dtype, int(arch.removeprefix("sm_"))):
                    yield configuration, usage
            except Exception as error:  # a failure of one kernel must not hide the others
                yield configuration, f"{op.name} failed for {dtype} on {arch}: {type(error).__name__}: {error}"


def line(configuration: Configuration, usage: Usage) -> str:
    return LINE.format(
        usage.op,
        usage.kernel.strip("_").removesuffix("_kernel"),
        usage.dtype.replace("float", "fp").replace("bfp", "bf"),
        usage.arch,
        usage.registers,
        usage.spilled,
        usage.shared,
        f"{usage.occupancy:.0%}",
        "/".join(map(str, usage.load_bits)) or "-",
        usage.mma,
        "-" if usage.per_weight is None else f"{usage.per_weight:.1f}",
        ",".join(f"{axis}={size}" for axis, size in configuration.sizes) or "typical",
    )


def parse_choice(flag: str, allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """Parser of a comma-separated list; argparse prints the error's sentence."""

    def parse(text: str) -> list[str]:
        for value in text.split(","):
            if value not in allowed:
                raise argparse.ArgumentTypeError(f"{flag} has {value!r}, must be of {', '.join(allowed)}")
        return text.split(",")

    return parse


def parse_sizes(text: str) -> dict[str, int]:
    """`AXIS=NUMBER,...` as a dict; the axes are those that some op's sample takes."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    axes = {axis for op in OPS.values() for axis in op.axes}
    for axis, _, value in pairs:
        if axis not in axes or not value.isdecimal():
            allowed = ", ".join(sorted(axes))
            raise argparse.ArgumentTypeError(f"--size has {axis}={value!r}, must be AXIS=NUMBER of {allowed}")
    return {axis: int(value) for axis, _, value in pairs}


def main(argv: Sequence[str] | None = None) -> int:
    """1 where a kernel could not be compiled or is over its budget."""
    archs = [f"sm_{capability}" for capability in SHARED_LIMIT]
    parser = argparse.ArgumentParser(
        prog="python -m lychee.compiler.static_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arch", type=parse_choice("--arch", archs), default=["sm_80", "sm_90"])
    parser.add_argument("--op", type=parse_choice("--op", list(OPS)), default=list(OPS))
    parser.add_argument("--dtype", type=parse_choice("--dtype", list(DTYPES)), default=list(DTYPES))
    parser.add_argument("--size", type=parse_sizes, help="these in place of the typical sizes, nothing else")
    parser.add_argument("--quick", action="store_true", help="of each kind one, in bfloat16, as the default tests do")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the lines there too")
    args = parser.parse_args(argv)
    if knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, and interpreted kernels do not compile: unset it")
    if args.size is None:
        wanted = [c for c in shipped() if c.op in args.op and c.dtype in args.dtype and (c.usual or not args.quick)]
    else:
        sizes = tuple(args.size.items())
        wanted = [Configuration(op, dtype, sizes) for op in args.op for dtype in args.dtype]
    print(LINE.format(*HEADER))
    failures, records = 0, []
    for configuration, found in check(wanted, args.arch):
        if isinstance(found, str):
            failures += 1
            print(found, flush=True)
            continue
        print(line(configuration, found), flush=True)
        over = broken_budgets(configuration, found)
        failures += sum(not sentence.startswith("known: ") for sentence in over)
        for sentence in over:
            print(f"  over its budget: {sentence}", flush=True)
        records.append({"sizes": dict(configuration.sizes), **asdict(found), "over_budget": over})
    if args.json:
        args.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    if failures:
        print(f"{failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
