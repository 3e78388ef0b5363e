"""From a function over ops to the Program of its calls: it is run once, on values that have sizes and no elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from itertools import count
from math import prod
from typing import Any, TypeVar, get_type_hints

import torch

from lychee.kernels.contract import Binding
from lychee.kernels.op import Op
from lychee.kernels.specs import spec_of

from .program import Call, Dim, Program, Size, Value, values_of

T = TypeVar("T")


class Traced(Value):
    """A value of a program in the making: calls of ops with it are added to `calls`; it has the views of a tensor."""

    def __init__(
        self,
        calls: list[Call],
        name: str,
        shape: tuple[Dim, ...],
        dtype: torch.dtype,
        device: torch.device,
        root: Value | None = None,
    ) -> None:
        super().__init__(name, shape, dtype, device, root)
        self.calls = calls

    def record(self, op: Op[Any, Any], arguments: dict[str, Any], binding: Binding) -> Any:
        first = sum(len(call.outputs) for call in self.calls)
        made = tuple(
            Traced(self.calls, str(number), binding.shape(spec), binding.dtype(spec), self.device)
            for number, spec in zip(count(first), op.contract.outputs, strict=False)
        )
        self.calls.append(Call(op, arguments, made))
        return made if len(made) > 1 else made[0] if made else None

    def view(self, *shape: Dim) -> Traced:
        """As `Tensor.view`: one size may be -1."""
        if -1 in shape:
            at = shape.index(-1)
            shape = (*shape[:at], _missing(self.shape, [*shape[:at], *shape[at + 1 :]]), *shape[at + 1 :])
        if _factors(shape) != _factors(self.shape):
            raise ValueError(f"{self} of {self.typed} has no view of shape {tuple(map(str, shape))}")
        return Traced(self.calls, self.name, shape, self.dtype, self.device, self.root)

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


def trace(function: Callable[[T], Any], struct: type[T], device: torch.device | str, **known: Any) -> Program:
    """The program of `function`, which takes a struct of tensors, and of whole numbers that are sizes as well.

    Its tensors become inputs named as its fields, of the axes that their specs name. `known` gives fields, of structs
    within as well, that are no inputs but what they are given as. Raises AttributeError, TypeError or ValueError where
    the function does something with a value that is neither an op nor a view.
    """
    calls: list[Call] = []

    def made(struct: type[Any]) -> Any:
        hints, values = get_type_hints(struct, include_extras=True), {}
        for name in (field.name for field in fields(struct)):
            if name in known:
                values[name] = known[name]
            elif spec := spec_of(hints[name]):
                shape = tuple(Size(axis, 1, more) for axis, more in spec.parsed)
                values[name] = Traced(calls, name, shape, spec.dtypes[0], torch.device(device))
            else:
                values[name] = made(hints[name]) if is_dataclass(hints[name]) else Size(name)
        return struct(**values)

    given = made(struct)
    result = function(given)
    return Program(tuple(values_of(given)), tuple(calls), result)
