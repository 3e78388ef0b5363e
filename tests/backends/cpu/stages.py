"""Takes a kernel through the compiler's stages one by one, so that a test can look between them or change a rule."""

import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import triton
from torch import Tensor
from triton import knobs

from lychee.backends.cpu import activated, compiler, jit, runtime
from lychee.backends.cpu.launch import SLOTS
from lychee.backends.cpu.lower import lower
from lychee.backends.cpu.target import Target, host
from lychee.backends.cpu.ttir import Func, generic_text, read

FORMATS = {elem: code for code, elem in reversed(SLOTS.values())}


class _Captured(Exception):  # noqa: N818 - it stops Triton's compiler once it has what we want
    pass


def generic_text_of(kernel: Any, *args: Any, **constants: Any) -> str:
    """What the reader reads of a kernel launched with these arguments. Nothing is lowered, nothing cached."""
    found: list[str] = []

    def capture(module: Any, metadata: Any) -> None:
        found.append(generic_text(module))
        raise _Captured

    with activated(), knobs.compilation.scope(), patch.object(compiler, "make_tir", capture):
        knobs.compilation.always_compile = True
        with suppress(_Captured):
            triton.jit(kernel.fn).run(*args, grid=(1,), warmup=True, **constants)
    return found[0]


def func_of(kernel: Any, *args: Any, **constants: Any) -> Func:
    return read(generic_text_of(kernel, *args, **constants))


def run(func: Func, *args: Any, grid: Sequence[int] = (1, 1, 1), target: Target | None = None) -> None:
    """Lower by the rules in force now, past every cache of kernels, and run; `args` are those that `func` has."""
    target = target or host()
    native = runtime.native()
    lowered = lower(func, target)
    with patch.object(jit, "host", lambda: target):
        function = jit.load(lowered.text)
    values = [a.data_ptr() if isinstance(a, Tensor) else a for a in args]
    slots = "".join(FORMATS[elem] for elem in lowered.args)
    native.launch(struct.pack(runtime.HEADER + slots, function, 1 << 40, *grid, *values), 1)
