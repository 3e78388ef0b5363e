"""From a function over ops to the Program of its calls: it is run once, on values that have sizes and no elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import count
from math import prod
from types import MappingProxyType
from typing import Any, TypeVar, cast, get_type_hints

import torch
from torch import Tensor

from lychee.kernels.contract import Binding
from lychee.kernels.op import Op
from lychee.kernels.specs import spec_of

from .program import Call, Program, Value
from .sizes import Dim, Size

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class Traced(Value):
    """A value of a program in the making: calls of ops with it are added to the trace; it has the views of a tensor."""

    tracer: Tracer = field(kw_only=True)

    def record(self, op: Op[Any, Any], arguments: dict[str, Any], binding: Binding) -> Any:
        made = tuple(
            self.tracer.value(str(next(self.tracer.numbers)), binding.shape(spec), binding.dtype(spec))
            for spec in op.contract.outputs
        )
        self.tracer.calls.append(Call(op, arguments, made))
        return made if len(made) > 1 else made[0] if made else None

    def view(self, *shape: Dim) -> Traced:
        """As `Tensor.view`: one size may be -1."""
        if -1 in shape:
            at = shape.index(-1)
            shape = (*shape[:at], _missing(self.shape, [*shape[:at], *shape[at + 1 :]]), *shape[at + 1 :])
        if _factors(shape) != _factors(self.shape):
            raise ValueError(f"{self} of {self.typed} has no view of shape {tuple(map(str, shape))}")
        return self._part(shape, self.offset)

    def __getitem__(self, index: int) -> Traced:
        """One of the parts along the first axis. Raises TypeError for any other index."""
        if not isinstance(index, int):
            raise TypeError(f"{self} is indexed with {index!r}, in a trace it must be a whole number")
        if self.offset != 0:
            raise ValueError(f"{self} is a part already, and has no parts in a trace")
        return self._part(self.shape[1:], _missing(self.shape[1:], []) * index)

    def narrow(self, dim: int, start: int, length: int) -> Traced:
        """As `Tensor.narrow`, of the first axis."""
        if dim != 0 or self.offset != 0:
            raise ValueError(f"{self} has only parts along its first axis in a trace, and no parts of parts")
        return self._part((length, *self.shape[1:]), prod(self.shape[1:]) * start)

    def _part(self, shape: tuple[Dim, ...], offset: Dim) -> Traced:
        return replace(self, shape=shape, view_of=self.root, offset=offset)

    def view_as(self, other: Value) -> Traced:
        return self.view(*other.shape)

    def flatten(self, start: int = 0, end: int = -1) -> Traced:
        stop = end % len(self.shape) + 1
        return self.view(*self.shape[:start], _missing(self.shape[start:stop], []), *self.shape[stop:])


def _factors(shape: Sequence[Dim]) -> tuple[int, list[str]]:
    """The number of elements: the product of what is known, and the names of what is not."""
    symbols = [size for size in shape if isinstance(size, Size)]
    if any(symbol.offset for symbol in symbols):
        raise ValueError(f"a value of shape {tuple(map(str, shape))} has no views in a trace")
    known = prod(size for size in shape if isinstance(size, int))
    return known * prod(symbol.factor for symbol in symbols), sorted(symbol.name for symbol in symbols)


def _missing(shape: Sequence[Dim], others: Sequence[Dim]) -> Dim:
    """The size with which `others` have as many elements as `shape`."""
    (known, names), (factor, used) = _factors(shape), _factors(others)
    for name in used:
        names.remove(name)
    if known % factor or len(names) > 1:
        raise ValueError(f"no size makes {tuple(map(str, others))} as many elements as {tuple(map(str, shape))}")
    return Size(names[0], known // factor) if names else known // factor


class Tracer:
    """Makes a program's inputs: values that stand for tensors of one device."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.inputs: list[Value] = []
        self.calls: list[Call] = []
        self.numbers = count()

    def value(self, name: str, shape: Sequence[Dim], dtype: torch.dtype) -> Traced:
        return Traced(name, tuple(shape), dtype, self.device, tracer=self)

    def tensor(self, name: str, shape: Sequence[Dim], dtype: torch.dtype) -> Tensor:
        """An input, which for the function that is traced is a tensor. A name that another has gets a number."""
        taken = {value.name for value in self.inputs}
        value = self.value(next(n for n in _names(name) if n not in taken), shape, dtype)
        self.inputs.append(value)
        return cast(Tensor, value)

    def struct(self, struct: type[T], rename: Mapping[str, str] = MappingProxyType({}), **known: Any) -> T:
        """A struct whose tensors are inputs named as its fields, of the axes that their specs name, `rename` applied.

        Its whole numbers are sizes. `known` gives fields, of structs within as well, that are no inputs.
        """
        hints, values = get_type_hints(struct, include_extras=True), {}
        for name in (f.name for f in fields(struct)):  # type: ignore[arg-type]
            if name in known:
                values[name] = known[name]
            elif spec := spec_of(hints[name]):
                shape = [Size(rename.get(axis, axis), 1, more) for axis, more in spec.parsed]
                values[name] = self.tensor(name, shape, spec.dtypes[0])
            else:
                within = is_dataclass(hints[name])
                values[name] = self.struct(hints[name], rename, **known) if within else Size(rename.get(name, name))
        return struct(**values)


def _names(name: str) -> Iterator[str]:
    """`name`, `name_2`, `name_3`, and so on."""
    yield name
    yield from (f"{name}_{i}" for i in count(2))


def trace(function: Callable[[Tracer], Tensor | tuple[Tensor, ...]], device: torch.device | str) -> Program:
    """The program of `function`, which makes its inputs and returns what is computed from them.

    Raises AttributeError, TypeError or ValueError where it does with a value what is neither an op nor a view.
    """
    tracer = Tracer(device)
    made = function(tracer)
    results = cast(tuple[Value, ...], made if isinstance(made, tuple) else (made,))
    return Program(tuple(tracer.inputs), tuple(tracer.calls), results)
