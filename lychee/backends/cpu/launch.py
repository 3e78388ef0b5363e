"""From a compiled kernel and its arguments to packets: launches through Triton, bound launches, tables of them."""

from __future__ import annotations

import ctypes
import struct
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

from . import jit, runtime, variants
from .driver import NAME, activated
from .errors import UnsupportedError
from .ttir import ReadError

# How `struct` packs an argument into its 8-byte slot, and the type that the lowering gives it; by Triton's name of it.
# 16-bit floats are rounded first, and travel as 32-bit ones.
SLOTS = {
    **{f"i{bits}": (code, f"i{bits}") for bits, code in ((8, "b7x"), (16, "h6x"), (32, "i4x"), (64, "q"))},
    **{f"u{bits}": (code, f"i{bits}") for bits, code in ((8, "B7x"), (16, "H6x"), (32, "I4x"), (64, "Q"))},
    "i1": ("?7x", "i1"),
    "u1": ("?7x", "i1"),
    "fp16": ("f4x", "f16"),
    "bf16": ("f4x", "bf16"),
    "fp32": ("f4x", "f32"),
    "fp64": ("d", "f64"),
    "*": ("Q", "ptr"),
}
ROUNDED = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Nanoseconds of work in a grid from which waking the other threads pays.
FORK = 20_000


def rounded(value: float, kind: str) -> float:
    """A number as the 16-bit type has it."""
    return float(torch.tensor(value, dtype=ROUNDED[kind]).item())


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from _flat(value)
        else:
            yield value


class Launcher:
    """Triton's launcher of one compiled kernel: packs the arguments and runs the grid.

    `places` are the (flattened) parameters that exist at run time, `names` and `kinds` theirs and their types' names.
    """

    def __init__(self, src: Any, metadata: Any) -> None:
        """`src.signature` has a type for every parameter; `metadata` has what `compiler.make_llir` left there."""
        kinds = list(_flat(src.signature.values()))
        names = [str(name) for name, kind in src.signature.items() for _ in _flat((kind,))]
        self.kernel = metadata.name
        self.places = [i for i, kind in enumerate(kinds) if kind != "constexpr"]
        self.names = [names[i] for i in self.places]
        self.kinds = [kinds[i] for i in self.places]
        formats, types = "", []
        for name, kind in zip(self.names, self.kinds, strict=True):
            code, elem = SLOTS.get("*" if kind.startswith("*") else kind, ("", ""))
            if not code:
                raise TypeError(f"{self.kernel}: {name} is of type {kind}, which no CPU kernel takes")
            formats += code
            types.append(elem)
        if types != list(metadata.args):
            raise RuntimeError(f"{self.kernel}: Triton passes {types}, the compiled kernel takes {metadata.args}")
        self.pack = struct.Struct(runtime.HEADER + formats).pack
        self.least = max(2, -(-FORK // max(1, metadata.cost)))

    def packet(self, function: int, grid: Sequence[int], args: Iterable[Any]) -> bytes:
        """One launch as bytes. Raises TypeError, naming the argument, for what cannot be passed."""
        flat = list(_flat(args))
        values = [flat[i] for i in self.places]
        for i, (value, kind) in enumerate(zip(values, self.kinds, strict=True)):
            if kind.startswith("*") and hasattr(value, "data_ptr"):
                if value.device.type != "cpu":
                    raise TypeError(f"{self.kernel}: {self.names[i]} is on {value.device}, must be on the CPU")
                values[i] = value.data_ptr()
            elif kind in ROUNDED:
                values[i] = rounded(value, kind)
        try:
            return self.pack(function, self.least, *grid, *values)
        except struct.error as error:
            given = ", ".join(f"{name}={value!r}" for name, value in zip(self.names, values, strict=True))
            raise TypeError(f"{self.kernel}: grid {tuple(grid)} with {given} cannot be passed: {error}") from None

    def __call__(
        self,
        gx: int,
        gy: int,
        gz: int,
        stream: int,
        function: int,
        packed_metadata: Any,
        launch_metadata: Any,
        enter_hook: Any,
        exit_hook: Any,
        *args: Any,
    ) -> None:
        packet = self.packet(function, (gx, gy, gz), args)
        if enter_hook is not None:
            enter_hook(launch_metadata)
        native = runtime.native()
        native.launch(packet, native.threads())
        if exit_hook is not None:
            exit_hook(launch_metadata)


def launcher(src: Any, metadata: Any) -> Launcher:
    """The launcher of a kernel, the same one as long as its source lives."""
    known: Launcher | None = getattr(src, "cpu_launcher", None)
    if known is None:
        known = src.cpu_launcher = Launcher(src, metadata)
    return known


@cache
def loaded(kernel: bytes) -> int:
    """Address of a kernel, given what `compiler.make_llir` made of it."""
    return jit.load(jit.opened(kernel))


@contextmanager
def _anew() -> Iterator[None]:
    """Within, Triton compiles whatever its cache holds."""
    from triton import knobs

    with knobs.compilation.scope():
        knobs.compilation.always_compile = True
        yield


@contextmanager
def _apart() -> Iterator[None]:
    """Within, Triton's cache is a directory of this process."""
    from triton import knobs

    with knobs.cache.scope():
        knobs.cache.dir = _own_directory().name
        yield


@cache
def _own_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="lychee-kernels-")


def compiled(
    jit_function: Any, args: Sequence[Any], options: dict[str, Any], specialised: str | None = None
) -> tuple[int, Launcher]:
    """A kernel's address and launcher, specialised for the arguments, through Triton's caches.

    `specialised`: all that arguments and options decide, as text, by which what an earlier process compiled is found.
    A damaged or unwritable cache is worked around. What a kernel does wrong is raised as Triton or the lowering say it.
    """
    from triton import CompilationError

    if specialised is not None and (known := variants.found(jit_function, specialised)):
        variant, function = known
        return function, Launcher(variant.source, variant)

    def attempt() -> tuple[int, Launcher]:
        kernel = jit_function.run(*args, grid=(1,), warmup=True, **options)
        run = kernel.run
        if specialised is not None:
            variants.keep(jit_function, specialised, kernel)
        return kernel.function, run

    with activated():
        for scope in (nullcontext, _anew):
            try:
                with scope():
                    return attempt()
            except (CompilationError, UnsupportedError, ReadError):
                raise
            except Exception:  # whatever the state of the files leads to
                jit_function.device_caches.pop(NAME, None)
        with _apart():
            return attempt()


class Launch:
    """A launch with its arguments bound: calling it runs the grid on the tensors it was bound to and keeps alive."""

    def __init__(self, packet: bytes, keep: Sequence[Any]) -> None:
        self._packet = ctypes.create_string_buffer(packet, len(packet))
        self._keep = tuple(keep)
        self.address = ctypes.addressof(self._packet)

    def __call__(self) -> None:
        Table([self]).replay()


class Table:
    """Launches that run one after the other in a single native call."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        self._launches = tuple(launches)
        self._addresses = (ctypes.c_uint64 * len(launches))(*(launch.address for launch in launches))
        self._native = runtime.native()
        self._start = ctypes.addressof(self._addresses)

    def replay(self) -> None:
        self._native.replay(self._start, len(self._launches), self._native.threads())
