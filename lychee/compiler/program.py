"""A Program: straight-line op calls over named, typed values. What one reads as text is all there is to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from lychee.kernels.op import Op
from lychee.kernels.stand_in import StandIn, Symbol

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Size(Symbol):
    """factor * name + offset: a size that is known when a program is lowered."""

    name: str
    factor: int = 1
    offset: int = 0

    def __add__(self, more: int) -> Size:
        return Size(self.name, self.factor, self.offset + more)

    def __sub__(self, less: int) -> Size:
        return self + -less

    def __mul__(self, times: int) -> Size:
        return Size(self.name, self.factor * times, self.offset * times)

    __rmul__ = __mul__

    def __floordiv__(self, by: int) -> Size:
        if self.factor % by or self.offset % by:
            raise ValueError(f"{self} is not always a multiple of {by}")
        return Size(self.name, self.factor // by, self.offset // by)

    def __lt__(self, other: int) -> bool:
        """Only what holds of every size that is not negative."""
        if self.offset >= other:
            return False
        raise ValueError(f"whether {self} is below {other} is not known in a trace")

    def __str__(self) -> str:
        times, plus = f"{self.factor}*" if self.factor != 1 else "", f"+{self.offset}" if self.offset else ""
        return f"{times}{self.name}{plus}"

    def of(self, sizes: Sizes) -> int:
        return self.factor * sizes[self.name] + self.offset


Dim = int | Size


def concrete(size: Dim, sizes: Sizes) -> int:
    return size if isinstance(size, int) else size.of(sizes)


@dataclass(eq=False, repr=False)
class Value(StandIn):
    """A tensor of a program. A view is a value with a `root`, whose memory it is, from element `offset` on."""

    name: str
    shape: tuple[Dim, ...]
    dtype: torch.dtype
    device: torch.device
    view_of: Value | None = None
    offset: Dim = 0

    @property
    def root(self) -> Value:
        return self.view_of or self

    def __str__(self) -> str:
        return f"%{self.name}"

    @property
    def typed(self) -> str:
        """Dtype and shape."""
        return f"{_short(self.dtype)}[{', '.join(map(str, self.shape))}]"

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


@dataclass(frozen=True)
class Program:
    """Calls in the order in which they run. `inputs` are written before a run, `results` are read after it."""

    inputs: tuple[Value, ...]
    calls: tuple[Call, ...]
    results: tuple[Value, ...]

    def __str__(self) -> str:
        return self.text({})

    def text(self, names: Mapping[int, str]) -> str:
        """The program, a line for every call. `names` of constant tensors, by address."""
        lines = [f"({', '.join(f'{v}: {v.typed}' for v in self.inputs)})"]
        for call in self.calls:
            outputs = ", ".join(f"{v}: {v.typed}" for v in call.outputs)
            given = ", ".join(_shown(key, value, names) for key, value in call.arguments.items() if value is not None)
            lines.append(f"{outputs} = {call.op.name}({given})" if outputs else f"{call.op.name}({given})")
        returned = ", ".join(f"{_view(v)}: {v.typed}" for v in self.results)
        return "\n".join([*lines, f"return {returned}", ""])


def values_of(argument: Any) -> Iterator[Value]:
    """An argument's values."""
    if isinstance(argument, Value):
        yield argument
    elif is_dataclass(argument):
        for field in fields(argument):
            yield from values_of(getattr(argument, field.name))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("float", "f").replace("int", "i").replace("bool", "b8")


def _view(value: Value) -> str:
    if value.root is value:
        return str(value)
    start = f"[{value.offset}:]" if value.offset != 0 else ""
    return f"{value.root}{start}.view({', '.join(map(str, value.shape))})"


def _shown(key: str, value: Any, names: Mapping[int, str]) -> str:
    """An argument as text: `%values`, `@constants`, and scalars by name."""
    if isinstance(value, Value):
        return _view(value)
    if isinstance(value, Tensor):
        plain = f"{_short(value.dtype)}[{', '.join(map(str, value.shape))}]"
        return f"@{names.get(value.data_ptr(), plain)}"
    if is_dataclass(value) and not isinstance(value, Size):
        tensors = [_shown(f.name, v, names) for f in fields(value) if (v := getattr(value, f.name)) is not None]
        return f"{type(value).__name__}({', '.join(tensors)})"
    return f"{key}={value}"
