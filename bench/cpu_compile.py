"""What compiling costs: every op is called once, in one process with an empty cache and in a second one after it.

An empty kernel comes first, as "set-up": what it takes is Triton's, LLVM's and the runtime's start, once in a process.

python -m bench.cpu_compile FILE      calls every op and writes what Triton compiled as JSON (for `measure`)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

SIZES = {"num_tokens": 4, "vocab": 4096, "num_seqs": 2, "max_context": 128}


@dataclass(frozen=True)
class Kernel:
    """One variant that a launch asked Triton for; `cached` if it came from the cache."""

    op: str
    name: str
    seconds: float
    cached: bool


@dataclass(frozen=True)
class Process:
    """What one process did: its kernels, and the seconds of every op's first call."""

    kernels: tuple[Kernel, ...]
    first_calls: dict[str, float]


def measure() -> tuple[Process, Process]:
    """A process with an empty cache, then another with what the first left. Raises CalledProcessError."""
    with TemporaryDirectory() as directory:
        cold, warm = (_child(Path(directory), f"{n}.json") for n in ("cold", "warm"))
    return cold, warm


def _child(directory: Path, name: str) -> Process:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(directory / "cache")
    subprocess.run([sys.executable, "-m", "bench.cpu_compile", str(directory / name)], env=environment, check=True)
    record = json.loads((directory / name).read_text())
    return Process(tuple(Kernel(**kernel) for kernel in record["kernels"]), record["first_calls"])


def call_every_op() -> Process:
    import torch
    from triton import knobs

    from lychee.kernels import OPS
    from lychee.kernels.kernel import kernel

    @kernel
    def nothing(x):
        pass

    torch.manual_seed(0)  # of samples: in two processes the same variants
    kernels: list[Kernel] = []
    first_calls: dict[str, float] = {}

    def compiled(*, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:
        kernels.append(Kernel(running, metadata["name"], times.total / 1e6, cache_hit))

    with knobs.compilation.scope():
        knobs.compilation.listener = compiled
        running, started = "set-up", time.perf_counter()
        nothing[(1,)](torch.zeros(1))
        first_calls[running] = time.perf_counter() - started
        for running, op in OPS.items():
            sizes = {**op.typical, **{axis: size for axis, size in SIZES.items() if axis in op.axes}}
            inputs = op.sample(torch.float32, "cpu", **sizes)
            started = time.perf_counter()
            op(**inputs)
            first_calls[running] = time.perf_counter() - started
    return Process(tuple(kernels), first_calls)


def main(argv: Sequence[str]) -> None:
    (file,) = argv
    Path(file).write_text(json.dumps(asdict(call_every_op())))


if __name__ == "__main__":
    main(sys.argv[1:])
