"""Compiles ops for GPUs that need not be present, and says what the compiled kernels take of one.

An op runs its own launch on sample inputs of its `typical` sizes. A stand-in for Triton's driver names the
architecture, and every kernel that the launch starts is compiled instead of run, specialised as at run time.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import NamedTemporaryFile
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from . import Op, sass, sizes
from .kernel import Kernel

# Shared memory one block may use, in bytes (CUDA C++ Programming Guide, table "Technical Specifications").
SHARED_LIMIT = {80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


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
    occupancy: float  # share of a multiprocessor's warps
    mma: str  # the instruction that multiplies matrices
    load_bits: tuple[int, ...]  # widths of the main loop's loads
    local_accesses: int  # instructions that load or store spilled registers
    per_weight: float | None  # a thread's instructions in the main loop for each weight of its tile


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
        code = sass.Code.of(kernel.asm["cubin"])
        usages.append(
            Usage(
                op.name,
                name,
                dtype,
                f"sm_{capability}",
                registers,
                spilled,
                shared,
                num_warps,
                sass.occupancy(capability, registers, shared, num_warps),
                code.mma,
                code.load_bits,
                code.local_accesses,
                sass.instructions_per_weight(code, kernel),
            )
        )
    return usages
