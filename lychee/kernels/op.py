"""An Op is one operation with its faces: Triton launch, torch reference, sample inputs, cost.

The reference's annotated signature is the contract. A launch is destination-passing: outputs, then scratch, then the
inputs in the reference's order. `Op` allocates outputs from the contract's axes and refuses inputs that break it.
"""

from __future__ import annotations

import functools
import inspect
import types as pytypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Generic, ParamSpec, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from .types import Cost, Spec

P = ParamSpec("P")
R = TypeVar("R")
Scratch = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

OPS: dict[str, Op[Any, Any]] = {}


class ContractError(ValueError):
    """An argument does not fit the op's contract; the message names it, its value and what is allowed."""


def _members(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the hint alone."""
    return get_args(hint) if get_origin(hint) in (Union, pytypes.UnionType) else (hint,)


def _spec(hint: Any) -> Spec | None:
    """The Spec inside `Annotated[Tensor, Spec]` or `Annotated[Tensor, Spec] | None`."""
    annotated = (h for h in _members(hint) if get_origin(h) is Annotated)
    return next((m for h in annotated for m in h.__metadata__ if isinstance(m, Spec)), None)


def _optional(hints: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(k for k, hint in hints.items() if pytypes.NoneType in _members(hint))


@functools.cache
def _axes(text: str) -> tuple[tuple[str, int], ...]:
    """("num_seqs", 1) for `num_seqs+1`, axis by axis."""
    parts = (axis.partition("+") for axis in text.split())
    return tuple((name, int(more or 0)) for name, _, more in parts)


@functools.cache
def _struct_specs(struct: type) -> tuple[dict[str, Spec], frozenset[str]]:
    """Specs of a struct's tensor fields by name, and the names that may be None."""
    hints = get_type_hints(struct, include_extras=True)
    return {f.name: s for f in fields(struct) if (s := _spec(hints[f.name]))}, _optional(hints)


class Contract:
    """Specs of an op's inputs and outputs, read from the reference's annotations."""

    def __init__(self, name: str, reference: Callable[..., Any]) -> None:
        hints = get_type_hints(reference, include_extras=True)
        returned = hints.pop("return")
        outs = get_args(returned) if get_origin(returned) is tuple else (returned,)
        self.name = name
        self.outputs = tuple(s for h in outs if (s := _spec(h)))
        self.inputs = {k: s for k, h in hints.items() if (s := _spec(h))}
        self.structs = {k: cast(type, m) for k, h in hints.items() for m in _members(h) if is_dataclass(m)}
        self.optional = _optional(hints)
        signature = inspect.signature(reference).parameters
        self.parameters = tuple(signature)
        self.defaults = {k: p.default for k, p in signature.items() if p.default is not p.empty}

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
            specs, optional = _struct_specs(struct)
            for field, spec in specs.items():
                if (value := getattr(arguments[key], field)) is not None or field not in optional:
                    yield f"{key}.{field}", spec, value

    def check(self, arguments: Mapping[str, Any]) -> Binding:
        """Unify axes, dtypes and device over all tensors; refuse what does not fit."""
        binding = Binding(self.name, {k: v for k, v in arguments.items() if type(v) is int})
        for key, spec, tensor in self.tensors(arguments):
            binding.bind(key, spec, tensor)
        return binding


class Binding:
    """Axis sizes, shared dtypes and the device of one call."""

    def __init__(self, op_name: str, sizes: Mapping[str, int]) -> None:
        self.op_name = op_name
        self.sizes = dict(sizes)
        self.sources = dict.fromkeys(sizes, "the argument")
        self.dtypes: dict[tuple[torch.dtype, ...], tuple[torch.dtype, str]] = {}
        self.device: torch.device | None = None

    def bind(self, key: str, spec: Spec, tensor: Tensor) -> None:
        where = f"{self.op_name}: {key}"
        if not isinstance(tensor, Tensor):
            raise ContractError(f"{where} is {type(tensor).__name__}, must be a tensor of [{spec.axes}]")
        dtype, source = self.dtypes.setdefault(spec.dtypes, (tensor.dtype, key))
        if tensor.dtype not in spec.dtypes:
            allowed = " or ".join(str(d).removeprefix("torch.") for d in spec.dtypes)
            raise ContractError(f"{where} is {tensor.dtype}, must be {allowed}")
        if tensor.dtype != dtype:
            raise ContractError(f"{where} is {tensor.dtype} where {source} is {dtype}")
        axes = _axes(spec.axes)
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
        if not tensor.is_contiguous():
            raise ContractError(f"{where} is not contiguous (strides {tensor.stride()})")
        if self.device is None:
            self.device = tensor.device
        elif self.device != tensor.device:
            raise ContractError(f"{where} is on {tensor.device} where another argument is on {self.device}")

    def shape(self, spec: Spec) -> tuple[int, ...]:
        return tuple(self.sizes[name] + more for name, more in _axes(spec.axes))

    def dtype(self, spec: Spec) -> torch.dtype:
        return spec.dtypes[0] if len(spec.dtypes) == 1 else self.dtypes[spec.dtypes][0]


class Op(Generic[P, R]):
    """A registered operation: call it, or use one of its faces (`launch`, `reference`, `sample`, `cost`)."""

    def __init__(
        self,
        launch: Callable[..., None],
        reference: Callable[P, R],
        sample: Callable[..., dict[str, Any]],
        cost: Callable[..., Cost],
        typical: Mapping[str, int],
        scratch: Callable[..., Scratch] | None,
    ) -> None:
        self.name = launch.__name__
        self.launch, self.reference, self.sample, self.cost = launch, reference, sample, cost
        self.typical, self.scratch = dict(typical), scratch
        self.contract = Contract(self.name, reference)
        keyword_only = inspect.Parameter.KEYWORD_ONLY
        self.axes = tuple(n for n, p in inspect.signature(sample).parameters.items() if p.kind is keyword_only)
        self.__doc__ = launch.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        arguments = self.contract.arguments(args, kwargs)
        binding = self.contract.check(arguments)
        if binding.device is None or binding.device.type != "cuda":
            return cast(Callable[..., R], self.reference)(**arguments)
        return self.run(arguments, binding)

    def run(self, arguments: Mapping[str, Any], binding: Binding) -> R:
        """Allocate outputs and scratch, launch, and return the outputs."""
        outputs = [
            torch.empty(binding.shape(s), dtype=binding.dtype(s), device=binding.device) for s in self.contract.outputs
        ]
        extra = self.scratch(**arguments) if self.scratch else {}
        scratch = [torch.empty(shape, dtype=dtype, device=binding.device) for shape, dtype in extra.values()]
        self.launch(*outputs, *scratch, **arguments)
        return cast(R, tuple(outputs) if len(outputs) > 1 else outputs[0] if outputs else None)


def op(
    *,
    reference: Callable[P, R],
    sample: Callable[..., dict[str, Any]],
    cost: Callable[..., Cost],
    typical: Mapping[str, int],
    scratch: Callable[..., Scratch] | None = None,
) -> Callable[[Callable[..., None]], Op[P, R]]:
    """Register a launch as an op. `typical` gives a production size for every axis that `sample` takes.

    `scratch(**inputs)` names buffers (shape, dtype) that the launch needs besides its outputs; they follow the outputs.
    """

    def register(launch: Callable[..., None]) -> Op[P, R]:
        made = Op(launch, reference, sample, cost, typical, scratch)
        if made.name in OPS:
            raise ValueError(f"op {made.name} is registered twice")
        if set(made.axes) != set(typical):
            raise ValueError(f"op {made.name}: typical has {sorted(typical)}, sample takes {sorted(made.axes)}")
        OPS[made.name] = made
        return made

    return register
