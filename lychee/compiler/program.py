"""A Program: straight-line op calls over named, typed values. What one reads as text is all there is to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from lychee.kernels.contract import Binding
from lychee.kernels.op import Op
from lychee.kernels.stand_in import StandIn

from .sizes import Dim, Size, Sizes, concrete

DTYPE_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.bool: "b8",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
}


@dataclass(eq=False, repr=False)
class Value(StandIn):
    """A tensor of a program. A view is a value with a `root`, whose memory it is, from element `offset` on."""

    name: str
    shape: tuple[Dim, ...]
    dtype: torch.dtype
    device: torch.device
    view_of: Value | None = None
    offset: Dim = 0

    def record(self, op: Op[Any, Any], arguments: dict[str, Any], binding: Binding) -> Any:
        """Only `trace.Traced` takes calls. Raises TypeError."""
        raise TypeError(f"{op.name} is called with {self}, of a program that is complete")

    @property
    def root(self) -> Value:
        return self.view_of or self

    def __str__(self) -> str:
        return f"%{self.name}"

    @property
    def typed(self) -> str:
        """Dtype and shape."""
        return f"{DTYPE_NAMES[self.dtype]}[{', '.join(map(str, self.shape))}]"

    def concrete_shape(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(concrete(size, sizes) for size in self.shape)

    def num_bytes(self, sizes: Sizes) -> int:
        return prod(self.concrete_shape(sizes)) * self.dtype.itemsize


@dataclass(frozen=True)
class Call:
    """One op call. Arguments are values, constants (tensors and what is made of them) and plain scalars."""

    op: Op[Any, Any]
    arguments: Mapping[str, Any]
    outputs: tuple[Value, ...]

    @property
    def reads(self) -> Iterator[Value]:
        """The values among the arguments, inside structs too."""
        for argument in self.arguments.values():
            yield from values_of(argument)

    def text(self, names: Mapping[Any, str]) -> str:
        """`names`: as `Program.keys` gives them."""
        outputs = ", ".join(f"{v}: {v.typed}" for v in self.outputs)
        called = f"{self.op.name}({_listed(self.arguments, names)})"
        return f"{outputs} = {called}" if outputs else called


@dataclass(frozen=True)
class Program:
    """Calls in the order in which they run. `inputs` are written before a run, `results` are read after it."""

    inputs: tuple[Value, ...]
    calls: tuple[Call, ...]
    results: tuple[Value, ...]

    def __str__(self) -> str:
        return self.text({})

    def text(self, names: Mapping[int, str]) -> str:
        """The program, a line for every call. `names` of constants, by the address of their first tensor.

        `parse.parse` makes the program of its text and its constants.
        """
        keys = self.keys(names)
        returned = ", ".join(f"{_view(v)}: {v.typed}" for v in self.results)
        given = ", ".join(f"{v}: {v.typed}" for v in self.inputs)
        return "\n".join([f"({given})", *(call.text(keys) for call in self.calls), f"return {returned}", ""])

    def keys(self, names: Mapping[int, str]) -> dict[Any, str]:
        """The name of each constant, by `key_of`."""
        return {key_of(constant): name for name, constant in self.constants(names).items()}

    def constants(self, names: Mapping[int, str]) -> dict[str, Any]:
        """Tensors, and structs of nothing else, under the names that they have in `text(names)`.

        Those without a name of their own are numbered.
        """
        found = {key_of(constant): constant for call in self.calls for constant in _constants(call.arguments.values())}
        named: dict[str, Any] = {}
        for number, (key, constant) in enumerate(found.items()):
            name = names.get(key[1][0][0], str(number))
            named[str(number) if name in named else name] = constant
        return named


def values_of(argument: Any) -> Iterator[Value]:
    """An argument's values."""
    if isinstance(argument, Value):
        yield argument
    elif is_dataclass(argument):
        for field in fields(argument):
            yield from values_of(getattr(argument, field.name))


def is_constant(argument: Any) -> bool:
    """Whether it is a tensor, or a struct of tensors that are no values."""
    if isinstance(argument, Tensor):
        return True
    if not is_dataclass(argument) or isinstance(argument, (Value, Size)) or next(values_of(argument), None) is not None:
        return False
    return any(is_constant(getattr(argument, field.name)) for field in fields(argument))


def key_of(constant: Any) -> tuple[type, tuple[Any, ...]]:
    """Equal for constants that are the same memory, read as the same type."""
    tensors = [constant] if isinstance(constant, Tensor) else [v for v in vars(constant).values() if is_constant(v)]
    return type(constant), tuple((t.data_ptr(), t.dtype, tuple(t.shape)) for t in tensors)


def _constants(arguments: Any) -> Iterator[Any]:
    for argument in arguments:
        if is_constant(argument):
            yield argument
        elif is_dataclass(argument) and not isinstance(argument, (Value, Size)):
            yield from _constants(getattr(argument, field.name) for field in fields(argument))


def _view(value: Value) -> str:
    if value.root is value:
        return str(value)
    start = f"[{value.offset}:]" if value.offset != 0 else ""
    return f"{value.root}{start}.view({', '.join(map(str, value.shape))})"


def _listed(arguments: Mapping[str, Any], names: Mapping[Any, str]) -> str:
    """Tensors and structs by place, the rest by name; None is left out, and what follows it has its name."""
    shown, by_place = [], True
    for key, value in arguments.items():
        if value is None:
            by_place = False
            continue
        text = _shown(value, names)
        by_place = by_place and (is_dataclass(value) or isinstance(value, Tensor)) and not isinstance(value, Size)
        shown.append(text if by_place else f"{key}={text}")
    return ", ".join(shown)


def _shown(value: Any, names: Mapping[Any, str]) -> str:
    """An argument as text: `%values`, `@constants`, structs of them, and scalars."""
    if isinstance(value, Value):
        return _view(value)
    if is_constant(value):
        return f"@{names[key_of(value)]}"
    if is_dataclass(value) and not isinstance(value, Size):
        return f"{type(value).__name__}({_listed({f.name: getattr(value, f.name) for f in fields(value)}, names)})"
    return str(value)
