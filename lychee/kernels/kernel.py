"""`@kernel` for functions that launches start: `triton.jit`, and a short way to the compiled code for CPU tensors.

A launch on CPU tensors goes through Python generated for the kernel: a key of what Triton would specialise on finds the
compiled variant, one `struct.pack` makes the packet, one native call runs it. Any other launch is Triton's own.

Triton makes a constant of every integer argument that is 1. Here only constexpr parameters are constants: sizes of 1
come and go with the requests, and each would compile a kernel.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from inspect import Parameter
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from ..backends.cpu.launch import ROUNDED, Launch, Launcher, Table, compiled, rounded
from ..backends.cpu.runtime import native
from .stand_in import BoundTensor

__all__ = ["Kernel", "Launch", "Table", "can_bind", "kernel"]

Grid = Sequence[int] | Callable[[dict[str, Any]], Sequence[int]]

_PAD = {1: (1, 1), 2: (1,), 3: ()}
_SCALARS = (int, bool, float, type(None))
_CONSTANTS = (int, float, str, type(None), tl.dtype, JITFunction)
_ERRORS = (AttributeError, KeyError, TypeError, struct.error)  # of a key or packet of other arguments than the last
_INT32 = range(-(1 << 31), 1 << 31)
_INT64 = range(-(1 << 63), 1 << 63)

# `packet` stays None where the variant is not known yet, or not what these arguments want.
_SOURCE = """
def {name}(_grid_, {parameters}, **_options_):
    {unwrap}
    if _grid_.__class__ is not tuple:
        _grid_ = _resolve_(_grid_, dict({named}))
    _packet_ = None
    try:
        if {on_cpu}:
            _packet_ = _variants_[{key}](_grid_, {values})
    except _errors_:
        pass
    if _packet_ is None:
        _packet_ = _miss_(_grid_, ({values},), _options_)
        if _packet_ is None:
            return
    _launch_(_packet_, _threads_())

def key({values}, _options_):
    return {key}
"""
_VARIANT = """
def pack_arguments(_grid_, {values}):
    _x_, _y_, _z_ = _grid_
    return _pack_(_function_, _least_, _x_, _y_, _z_, {slots})
"""


def _padded(grid: Sequence[int]) -> tuple[int, ...]:
    grid = tuple(grid)
    if len(grid) not in _PAD:
        raise ValueError(f"a grid has 1 to 3 axes, got {grid}")
    return grid + _PAD[len(grid)]


def _resolved(grid: Any, arguments: dict[str, Any]) -> tuple[int, ...]:
    return _padded(grid(arguments) if callable(grid) else grid)


def _width(value: Any) -> str:
    """Triton's type of an integer argument; nothing for others."""
    return "" if type(value) is not int or value in _INT32 else "i64" if value in _INT64 else "u64"


def _text(key: Any) -> str:
    """The key of a variant as another process would write it."""
    if isinstance(key, tuple):
        return f"({', '.join(map(_text, key))})"
    return str(key.cache_key) if isinstance(key, JITFunction) else repr(key)


class Kernel:
    """A JITFunction that can be launched, `kernel[grid](*args, **kwargs)`, on any device."""

    def __init__(self, function: Any) -> None:
        self.jit = function
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        signature = function.signature.parameters
        if any(p.kind is not Parameter.POSITIONAL_OR_KEYWORD for p in signature.values()):
            raise TypeError(f"{self.__name__}: a kernel takes plain parameters, no * and no **")
        self._defaults = {f"_default_{k}_": p.default for k, p in signature.items() if p.default is not p.empty}
        self._kinds = ["constexpr" if p.is_constexpr else "" for p in function.params]
        self._variants: dict[Any, Callable[..., bytes]] = {}
        self._launch: Callable[..., None] = self._first
        self._key: Callable[..., Any]

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        if isinstance(grid, tuple) and len(grid) in _PAD:
            return partial(self._launch, grid + _PAD[len(grid)])
        return partial(self._launch, grid if callable(grid) else _padded(grid))

    def bind(self, grid: Sequence[int], *args: Any, **kwargs: Any) -> Launch:
        """The launch `self[grid](*args, **kwargs)` on CPU tensors, to be run later, any number of times."""
        names = self.jit.arg_names
        bound = self.jit.signature.bind(*args, **{k: v for k, v in kwargs.items() if k in names})
        bound.apply_defaults()
        values = tuple(v.value if isinstance(v, tl.constexpr) else v for v in bound.args)
        return self._bound(_padded(grid), values, {k: v for k, v in kwargs.items() if k not in names})

    def _bound(self, grid: tuple[int, ...], values: tuple[Any, ...], options: dict[str, Any]) -> Launch:
        tensors = [v for v in values if isinstance(v, Tensor)]
        packet = None
        with suppress(*_ERRORS):
            if all(v.is_cpu for v in tensors):
                packet = self._variants[self._key(*values, options)](grid, *values)
        if packet is None:
            packet = self._miss(grid, values, options, bind=True)
        assert packet is not None
        return Launch(packet, tensors)

    def _first(self, grid: Any, *args: Any, **kwargs: Any) -> None:
        """Launch before any launch on CPU tensors: where all run elsewhere, nothing of the CPU's is set up."""
        if any(not v.is_cpu for v in (*args, *kwargs.values()) if isinstance(v, Tensor)):
            self.jit.run(*args, grid=grid, warmup=False, **kwargs)
        else:
            if self._launch == self._first:  # else `kernel[grid]` was kept from before the first launch
                self._generate()
            self._launch(grid, *args, **kwargs)

    def _generate(self) -> None:
        """Python for the kinds of arguments seen so far: constexpr, tensor, scalar or (both, by turns) mixed."""
        names = self.jit.arg_names
        key, on_cpu = [], []
        for name, kind in zip(names, self._kinds, strict=True):
            if kind == "constexpr":
                key.append(name)
            elif kind == "tensor":
                key.append(f"{name}.dtype")
                on_cpu.append(f"{name}.is_cpu")
            elif kind == "mixed":
                key.append(f"{name}.dtype if isinstance({name}, _Tensor_) else {name}.__class__")
                on_cpu.append(f"(not isinstance({name}, _Tensor_) or {name}.is_cpu)")
            else:
                key.append(f"{name}.__class__")
        constants = [name for name, kind in zip(names, self._kinds, strict=True) if kind == "constexpr"]
        source = _SOURCE.format(
            name=self.__name__,
            parameters=", ".join(f"{n}={d}" if (d := f"_default_{n}_") in self._defaults else n for n in names),
            unwrap="; ".join(f"{n} = {n}.value if {n}.__class__ is _constexpr_ else {n}" for n in constants) or "pass",
            named=", ".join(f"{n}={n}" for n in names),
            values=", ".join(names),
            on_cpu=" and ".join(on_cpu) or "True",
            key=f"({', '.join(key)}, tuple(_options_.items()) if _options_ else ())",
        )
        run = native()
        scope = {
            **self._defaults,
            "_constexpr_": tl.constexpr,
            "_Tensor_": Tensor,
            "_resolve_": _resolved,
            "_variants_": self._variants,
            "_errors_": _ERRORS,
            "_miss_": self._miss,
            "_launch_": run.launch,
            "_threads_": run.threads,
        }
        exec(source, scope)
        self._variants.clear()
        self._launch, self._key = scope[self.__name__], scope["key"]

    def _learn(self, values: Iterable[Any]) -> None:
        kinds = []
        for value, kind in zip(values, self._kinds, strict=True):
            now = "tensor" if isinstance(value, Tensor) else "scalar"
            kinds.append(kind if kind == "constexpr" else now if kind in ("", now) else "mixed")
        if kinds != self._kinds:
            self._kinds = kinds
            self._generate()

    def _keyed(self, values: Iterable[Any]) -> bool:
        """Whether the key tells these values apart as finely as they are compiled."""
        for value, kind in zip(values, self._kinds, strict=True):
            if kind == "constexpr":
                if not isinstance(value, _CONSTANTS):
                    return False
            elif not isinstance(value, Tensor) and type(value) not in _SCALARS:
                return False
        return True

    def _miss(
        self, grid: tuple[int, ...], values: tuple[Any, ...], options: dict[str, Any], bind: bool = False
    ) -> bytes | None:
        """The launch's packet, compiling the kernel if need be; None when it ran on the tensors' own device."""
        if not bind and (bound := next((v for v in values if isinstance(v, BoundTensor)), None)) is not None:
            plain = tuple(v.as_subclass(Tensor) if isinstance(v, BoundTensor) else v for v in values)
            bound.launches.append(self._bound(grid, plain, options))
            return None
        if bind and self._launch == self._first:
            self._generate()
        on_cpu = all(v.is_cpu for v in values if isinstance(v, Tensor))
        if not on_cpu and not bind:
            self.jit.run(*values, grid=grid, warmup=False, **options)
            return None
        self._learn(values)
        if not on_cpu or not self._keyed(values):
            function, launcher = self._compiled(values, options)
            return launcher.packet(function, grid, values)
        key = self._key(*values, options)
        widths = tuple(map(_width, values))
        if any(widths):  # the plain key is of 32-bit integers, which `struct` checks
            key = (key, widths)
        if key not in self._variants:
            function, launcher = self._compiled(values, options, _text(key))
            self._variants[key] = self._variant(function, launcher)
        try:
            return self._variants[key](grid, *values)
        except struct.error:
            function, launcher = self._compiled(values, options)
            return launcher.packet(function, grid, values)  # says what is wrong

    def _compiled(
        self, values: Iterable[Any], options: dict[str, Any], specialised: str | None = None
    ) -> tuple[int, Launcher]:
        """`compiled` for arguments like these, but for the integers that are 1."""
        pairs = zip(values, self._kinds, strict=True)
        plain = [2 if type(value) is int and value == 1 and kind != "constexpr" else value for value, kind in pairs]
        return compiled(self.jit, plain, options, specialised)

    def _variant(self, function: int, launcher: Launcher) -> Callable[..., bytes]:
        """Packs the grid and the arguments of one compiled variant."""
        slots = []
        for name, kind in zip(launcher.names, launcher.kinds, strict=True):
            narrow = f"_rounded_({name}, {kind!r})" if kind in ROUNDED else name
            slots.append(f"{name}.data_ptr()" if kind.startswith("*") else narrow)
        scope: dict[str, Any] = {"_pack_": launcher.pack, "_function_": function, "_least_": launcher.least}
        scope["_rounded_"] = rounded
        exec(_VARIANT.format(values=", ".join(self.jit.arg_names), slots=", ".join(slots)), scope)
        return scope["pack_arguments"]  # type: ignore[no-any-return]


def can_bind(device: torch.device) -> bool:
    """Whether launches on the device's tensors can be bound and replayed: they are compiled for the CPU."""
    return device.type == "cpu" and not triton.knobs.runtime.interpret


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`@triton.jit`, with its options, for a function that is launched; under TRITON_INTERPRET=1 nothing else."""
    if function is None:
        return partial(kernel, **options)
    made = triton.jit(function, **options)
    return Kernel(made) if isinstance(made, JITFunction) else made
