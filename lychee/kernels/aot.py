"""Compiles every registered op for GPUs that need not be present: `python -m lychee.kernels.aot --arch sm_80,sm_90`.

Each op runs its own launch on sample inputs of its `typical` sizes. A stand-in for Triton's driver names the
architecture, and every kernel that the launch starts is compiled instead of run, specialised as at run time.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from tempfile import NamedTemporaryFile
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from . import OPS, Op, sizes
from .kernel import Kernel

# Shared memory one block may use, in bytes (CUDA C++ Programming Guide, table "Technical Specifications").
SHARED_LIMIT = {80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LINE = "{:<20} {:<32} {:<9} {:<6} {:>9} {:>7} {:>7} {:>5}"


class CompileError(RuntimeError):
    """An op cannot run on the architecture; the message says why."""


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes of the GPU."""

    op: str
    kernel: str
    dtype: str
    arch: str
    registers: int  # per thread
    spilled: int  # bytes of stack per thread; spilled registers live there
    shared: int  # bytes per block
    num_warps: int


class _OfflineDriver:
    """The part of a Triton driver that compilation asks; the architecture serves as the device number."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self.capability, 32)


class _ZeroSamples(TorchFunctionMode):
    """Gives zeros for random normals: compilation reads shapes only, and untouched zeros cost no time or memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return (torch.zeros if func is torch.randn else func)(*args, **(kwargs or {}))


@contextmanager
def _compiling(capability: int) -> Iterator[list[Any]]:
    """Within, a kernel launch compiles for the architecture; gives the list of compiled kernels, each once."""
    compiled: dict[str, Any] = {}
    launch: Callable[..., Any] = JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        kernel = launch(self, *args, **{**kwargs, "warmup": True})
        if kernel.hash not in compiled:
            compiled[kernel.hash] = kernel
            kernels.append(kernel)

    kernels: list[Any] = []
    driver.set_active(_OfflineDriver(capability))
    try:
        through_triton = patch.object(Kernel, "__getitem__", lambda self, grid: self.jit[grid])
        gpu_tiles = patch.object(sizes, "runs_on_cpu", lambda x: False)
        with through_triton, gpu_tiles, patch.object(JITFunction, "run", run):
            yield kernels
    finally:
        if torch.cuda.is_available():
            driver.reset_active()


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack per thread, from the binary itself."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise CompileError(f"cuobjdump reports no resource usage: {text!r}")
    return int(found[1]), int(found[2])


def shaped_inputs(op: Op[Any, Any], dtype: torch.dtype, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Inputs of the op's typical sizes, replaced by `sizes` where it takes them; the same in every call."""
    with torch.random.fork_rng(devices=[]), _ZeroSamples():
        torch.manual_seed(0)
        return op.sample(dtype, "cpu", **{**op.typical, **{k: v for k, v in sizes.items() if k in op.axes}})


def compile_op(op: Op[Any, Any], inputs: Mapping[str, Any], dtype: str, capability: int) -> list[Usage]:
    """Every kernel that the op's launch starts on these inputs, compiled.

    Raises CompileError when the launch starts none or one needs more shared memory than the architecture has;
    Triton's own errors pass through.
    """
    arguments = op.contract.arguments((), inputs)
    with _compiling(capability) as kernels:
        op.run(arguments, op.contract.check(arguments))
    if not kernels:
        raise CompileError("the launch starts no Triton kernel")
    usages = []
    for kernel in kernels:
        registers, spilled = resources(kernel.asm["cubin"])
        name, shared, num_warps = kernel.name, kernel.metadata.shared, kernel.metadata.num_warps
        if shared > SHARED_LIMIT[capability]:
            raise CompileError(f"{name} takes {shared} bytes of shared memory, at most {SHARED_LIMIT[capability]}")
        usages.append(Usage(op.name, name, dtype, f"sm_{capability}", registers, spilled, shared, num_warps))
    return usages


def compile_all(names: Sequence[str], dtypes: Sequence[str], archs: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Print a line for each kernel and each failure as it comes; gives the number of failures."""
    failures = 0
    print(LINE.format("op", "kernel", "dtype", "arch", "registers", "spilled", "shared", "warps"))
    for name, dtype in itertools.product(names, dtypes):
        inputs = shaped_inputs(OPS[name], DTYPES[dtype], sizes)
        for arch in archs:
            try:
                usages = compile_op(OPS[name], inputs, dtype, int(arch.removeprefix("sm_")))
            except Exception as error:  # a failure of one kernel must not hide the others
                failures += 1
                print(f"{name:<20} failed for {dtype} on {arch}: {type(error).__name__}: {error}")
            else:
                print(*(LINE.format(*astuple(usage)) for usage in usages), sep="\n", flush=True)
    return failures


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
    """Print one line per compiled kernel; 1 when any op failed."""
    archs = [f"sm_{capability}" for capability in SHARED_LIMIT]
    parser = argparse.ArgumentParser(prog="python -m lychee.kernels.aot", description=__doc__)
    parser.add_argument("--arch", type=parse_choice("--arch", archs), default=["sm_80", "sm_90"])
    parser.add_argument("--op", type=parse_choice("--op", list(OPS)), default=list(OPS))
    parser.add_argument("--dtype", type=parse_choice("--dtype", list(DTYPES)), default=list(DTYPES))
    parser.add_argument("--size", type=parse_sizes, default={}, help="AXIS=NUMBER,... in place of the typical sizes")
    args = parser.parse_args(argv)
    if knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, and interpreted kernels do not compile: unset it")
    failures = compile_all(args.op, args.dtype, args.arch, args.size)
    if failures:
        print(f"{failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
