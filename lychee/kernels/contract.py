"""What an op accepts, read from its reference's annotations: each tensor's axes, dtypes and unit.

`Contract.check` refuses in a sentence. Sound calls do not come here: generated code (`call_code.py`) lets them through.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import cached_property
from typing import Any, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from .specs import members, optional_of, spec_of, struct_specs
from .stand_in import StandIn, Symbol
from .types import Spec

NAMES = {int: "an int", float: "a float", bool: "True or False"}


class ContractError(ValueError):
    """An argument does not fit the op's contract; the message names it, its value and what is allowed."""


class Contract:
    """Specs of an op's inputs and outputs, read from the reference's annotations."""

    def __init__(self, name: str, reference: Callable[..., Any]) -> None:
        hints = get_type_hints(reference, include_extras=True)
        returned = hints.pop("return")
        outs = get_args(returned) if get_origin(returned) is tuple else (returned,)
        self.name = name
        self.outputs = tuple(s for h in outs if (s := spec_of(h)))
        self.inputs = {k: s for k, h in hints.items() if (s := spec_of(h))}
        self.structs = {k: cast(type, m) for k, h in hints.items() for m in members(h) if is_dataclass(m)}
        self.scalars = {k: h for k, h in hints.items() if h in (int, float, bool)}
        self.optional = optional_of(hints)
        signature = inspect.signature(reference)
        self.parameters = tuple(signature.parameters)
        self.defaults = {k: p.default for k, p in signature.parameters.items() if p.default is not p.empty}

    def struct_specs(self, key: str) -> tuple[dict[str, Spec], frozenset[str]]:
        """Specs of a struct argument's tensor fields by name, and the names that may be None."""
        return struct_specs(self.structs[key])

    def specs(self) -> Iterator[Spec]:
        """Of every tensor, inputs first."""
        yield from self.inputs.values()
        for key in self.structs:
            yield from self.struct_specs(key)[0].values()
        yield from self.outputs

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name, defaults filled in, in the signature's order."""
        positional = dict(zip(self.parameters, args, strict=False))
        given = {**self.defaults, **positional, **kwargs}
        twice = positional.keys() & kwargs.keys()
        if len(args) > len(self.parameters) or twice or given.keys() != set(self.parameters):
            raise TypeError(f"{self.name}: takes ({', '.join(self.parameters)}), got {len(args)} and {sorted(kwargs)}")
        return {k: given[k] for k in self.parameters}

    def tensors(self, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Spec, Tensor]]:
        """Every tensor argument with its spec, struct fields as `struct.field`; absent optional ones are skipped."""
        for key, spec in self.inputs.items():
            if arguments[key] is not None or key not in self.optional:
                yield key, spec, arguments[key]
        for key, struct in self.structs.items():
            if arguments[key] is None and key in self.optional:
                continue
            if not isinstance(arguments[key], struct):
                raise ContractError(f"{self.name}: {key} is {type(arguments[key]).__name__}, must be {struct.__name__}")
            specs, optional = self.struct_specs(key)
            for field, spec in specs.items():
                if (value := getattr(arguments[key], field)) is not None or field not in optional:
                    yield f"{key}.{field}", spec, value

    def check(self, arguments: Mapping[str, Any]) -> Binding:
        """Unify axes, dtypes and device over all tensors; refuse what does not fit."""
        for key, kind in self.scalars.items():
            self._check_scalar(key, kind, arguments[key])
        given: dict[str, Any] = {k: v for k, v in arguments.items() if type(v) is int or isinstance(v, Symbol)}
        binding = Binding(self.name, given)
        for key, spec, tensor in self.tensors(arguments):
            binding.bind(key, spec, tensor)
        return binding

    def _check_scalar(self, key: str, kind: type[Any], value: Any) -> None:
        """An int may stand for a float, and a symbol for a number; a bool is not one."""
        if kind is not bool and isinstance(value, Symbol):
            return
        if not isinstance(value, (int, float) if kind is float else kind) or (
            isinstance(value, bool) and kind is not bool
        ):
            raise ContractError(f"{self.name}: {key} is {value!r}, must be {NAMES[kind]}")
        if key in self.axes and value < 0:
            raise ContractError(f"{self.name}: {key} is {value}, must be at least 0")

    @cached_property
    def axes(self) -> frozenset[str]:
        """Names of the axes of all tensors; an int argument of such a name is that axis."""
        return frozenset(axis for spec in self.specs() for axis, _ in spec.parsed)


class Binding:
    """Axis sizes, shared dtypes and the device of one call."""

    def __init__(self, op_name: str, sizes: Mapping[str, int]) -> None:
        self.op_name = op_name
        self.sizes = dict(sizes)
        self.sources = dict.fromkeys(sizes, "the argument")
        self.dtypes: dict[tuple[torch.dtype, ...], tuple[torch.dtype, str]] = {}
        self.device: torch.device | None = None
        self.stand_in: StandIn | None = None
        """One of those among the arguments."""

    def bind(self, key: str, spec: Spec, tensor: Tensor | StandIn) -> None:
        where = f"{self.op_name}: {key}"
        if isinstance(tensor, StandIn):
            self.stand_in = tensor
        elif not isinstance(tensor, Tensor):
            raise ContractError(f"{where} is {type(tensor).__name__}, must be a tensor of [{spec.axes}]")
        dtype, source = self.dtypes.setdefault(spec.dtypes, (tensor.dtype, key))
        if tensor.dtype not in spec.dtypes:
            allowed = " or ".join(str(d).removeprefix("torch.") for d in spec.dtypes)
            raise ContractError(f"{where} is {tensor.dtype}, must be {allowed}")
        if tensor.dtype != dtype:
            raise ContractError(f"{where} is {tensor.dtype} where {source} is {dtype}")
        axes = spec.parsed
        if tensor.ndim != len(axes):
            raise ContractError(f"{where} has shape {tuple(tensor.shape)}, must be [{spec.axes}]")
        for (name, more), given in zip(axes, tensor.shape, strict=True):
            size = given - more
            if size < 0:
                raise ContractError(f"{where} has shape {tuple(tensor.shape)}, must be [{spec.axes}]")
            if self.sizes.setdefault(name, size) != size:
                raise ContractError(
                    f"{where} has {name}={size} where {self.sources[name]} has {name}={self.sizes[name]}"
                )
            self.sources.setdefault(name, key)
        if isinstance(tensor, Tensor) and not tensor.is_contiguous():
            raise ContractError(f"{where} is not contiguous (strides {tensor.stride()})")
        if isinstance(tensor, Tensor) and tensor.is_neg():
            raise ContractError(f"{where} is a view that is still to be negated, must be given as its resolve_neg()")
        if self.device is None:
            self.device = tensor.device
        elif self.device != tensor.device:
            raise ContractError(f"{where} is on {tensor.device} where another argument is on {self.device}")

    def shape(self, spec: Spec) -> tuple[int, ...]:
        return tuple(self.sizes[name] + more for name, more in spec.parsed)

    def dtype(self, spec: Spec) -> torch.dtype:
        return spec.dtypes[0] if len(spec.dtypes) == 1 else self.dtypes[spec.dtypes][0]
