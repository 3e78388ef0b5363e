"""From a program and its sizes to launches with everything bound, which one native call replays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from itertools import starmap
from math import prod
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from lychee.kernels.kernel import Launch, Table
from lychee.kernels.sizes import next_power_of_2
from lychee.kernels.stand_in import bound_class

from .memory import Need, assign
from .program import Program, Value, values_of
from .sizes import Size, Sizes, concrete

Buffer = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, eq=False)
class Lowered:
    """A program at fixed sizes. Write `inputs`, replay, read `results`, which the next replay overwrites.

    Both are in the program's order; inputs are zero at first. The arena holds all values but those.
    steps: the launches of each call.
    """

    inputs: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    steps: tuple[tuple[Launch, ...], ...]
    arena: Tensor
    _written: list[NDArray[Any] | None] = field(default_factory=list)

    def write(self, arrays: Sequence[NDArray[Any]]) -> None:
        """Write all inputs. An array that was written there last time is left out: it must not have been changed.

        One with fewer columns than its input goes into the first of them.
        """
        if not self._written:
            self._written.extend([None] * len(self.inputs))
        for at, (array, place) in enumerate(zip(arrays, self.places, strict=True)):
            if array is not self._written[at]:
                self._written[at] = array
                (place if place.shape == array.shape else place[:, : array.shape[1]])[...] = array

    @cached_property
    def table(self) -> Table:
        return Table([launch for step in self.steps for launch in step])

    @cached_property
    def places(self) -> list[NDArray[Any]]:
        """The inputs as arrays."""
        return [tensor.numpy() for tensor in self.inputs]

    @cached_property
    def outputs(self) -> list[NDArray[Any]]:
        """The results as arrays."""
        return [tensor.numpy() for tensor in self.results]

    def replay(self) -> None:
        self.table.replay()


def lower(program: Program, sizes: Sizes, arena: Tensor | None = None) -> Lowered:
    """Plan the memory of a program whose values are on the CPU, and bind its launches. Nothing is computed.

    `arena` [num_bytes] uint8 may be that of programs that run at other times; one that is too small is not used.
    """
    inputs = {v: torch.zeros(v.concrete_shape(sizes), dtype=v.dtype) for v in program.inputs}
    made, scratch, needs = _needs(program, sizes, inputs)
    offsets, num_bytes = assign(needs)
    if arena is None or len(arena) < num_bytes:
        arena = torch.empty(_roomy(num_bytes), dtype=torch.uint8)
    memory, places = Memory(arena), iter(offsets)

    launches: list[Launch] = []
    steps: list[tuple[Launch, ...]] = []
    bound = bound_class(launches)

    def placed(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return memory.tensor(next(places), shape, dtype).as_subclass(bound)

    tensors: dict[Value, Tensor] = {v: t.as_subclass(bound) for v, t in inputs.items()}
    tensors |= {v: placed(*buffer) for v, buffer in made.items()}
    arguments = Arguments(tensors, sizes)
    for call, buffers in zip(program.calls, scratch, strict=True):
        call.op.launch(
            *(tensors[v] for v in call.outputs), *(b and placed(*b) for b in buffers), **arguments.of(call.arguments)
        )
        steps.append(tuple(launches))
        launches.clear()
    results = tuple(arguments.value(v).as_subclass(Tensor) for v in program.results)
    return Lowered(tuple(inputs.values()), results, tuple(steps), arena)


def arena_bytes(program: Program, sizes: Sizes) -> int:
    """The size of the arena that `lower` would make. Constants may be on `meta`: nothing is read."""
    inputs = {v: torch.zeros(v.concrete_shape(sizes), dtype=v.dtype) for v in program.inputs}
    return _roomy(assign(_needs(program, sizes, inputs)[2])[1])


def _roomy(num_bytes: int) -> int:
    """Bytes of an arena. A program keeps the one that it was lowered in: where sizes grow one by one, most find room in
    the last arena, and all of them together are twice as large. Memory that is not written is not taken."""
    return next_power_of_2(num_bytes)


def _needs(
    program: Program, sizes: Sizes, inputs: Mapping[Value, Tensor]
) -> tuple[dict[Value, Buffer], list[list[Buffer | None]], list[Need]]:
    """Of each value that a call makes its buffer, of each call its scratch, and when memory is wanted for all these."""
    made = {v: (v.concrete_shape(sizes), v.dtype) for v in _outputs(program)}
    scratch = _scratch(program, sizes, inputs, made)
    needs = [Need(_num_bytes(*made[v]), *span) for v, span in _lives(program).items()]
    needs += [Need(_num_bytes(*b), step, step) for step, buffers in enumerate(scratch) for b in buffers if b]
    return made, scratch, needs


def _outputs(program: Program) -> Iterator[Value]:
    return (value for call in program.calls for value in call.outputs)


def _lives(program: Program) -> dict[Value, tuple[int, int]]:
    """From which call to which each call's outputs are needed, in the order of the calls."""
    first, last = {}, {}
    for step, call in enumerate(program.calls):
        for value in call.outputs:
            first[value] = last[value] = step
        for value in call.reads:
            last[value.root] = step
    last |= dict.fromkeys((value.root for value in program.results), len(program.calls))
    return {value: (step, last[value]) for value, step in first.items()}


def _scratch(
    program: Program, sizes: Sizes, inputs: Mapping[Value, Tensor], made: Mapping[Value, Buffer]
) -> list[list[Buffer | None]]:
    """The buffers that each call wants besides its outputs."""
    arguments = _shaped(sizes, inputs, made)
    return [
        list(call.op.scratch(**arguments.of(call.arguments)).values()) if call.op.scratch else []
        for call in program.calls
    ]


def shaped(program: Program, sizes: Sizes, inputs: Mapping[Value, Tensor]) -> Arguments:
    """Arguments for functions that look at shapes, and at the elements of inputs alone."""
    return _shaped(sizes, inputs, {v: (v.concrete_shape(sizes), v.dtype) for v in _outputs(program)})


def _shaped(sizes: Sizes, inputs: Mapping[Value, Tensor], made: Mapping[Value, Buffer]) -> Arguments:
    """Nothing has its place yet, so one span does for all values but the inputs."""
    most = max(starmap(_num_bytes, made.values()), default=0)
    blank = Memory(torch.empty(-(-most // 8) * 8, dtype=torch.uint8))
    buffers = {buffer: blank.tensor(0, *buffer) for buffer in set(made.values())}
    return Arguments({**inputs, **{v: buffers[buffer] for v, buffer in made.items()}}, sizes)


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return prod(shape) * dtype.itemsize


class Memory:
    """Bytes as tensors of any dtype."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory[: len(memory) // 8 * 8]
        self.views: dict[torch.dtype, Tensor] = {}

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The tensor that begins at byte `offset`, a multiple of its elements' size."""
        if dtype not in self.views:
            self.views[dtype] = self.memory.view(dtype)
        start = offset // dtype.itemsize
        return self.views[dtype][start : start + prod(shape)].view(shape)


class Arguments:
    """Calls' arguments with tensors for values and whole numbers for sizes."""

    def __init__(self, tensors: Mapping[Value, Tensor], sizes: Sizes) -> None:
        self.tensors, self.sizes = tensors, sizes
        self.structs: dict[int, Any] = {}

    def of(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {key: self.one(argument) for key, argument in arguments.items()}

    def one(self, argument: Any) -> Any:
        if isinstance(argument, Value):
            return self.value(argument)
        if isinstance(argument, Size):
            return argument.of(self.sizes)
        if is_dataclass(argument) and any(True for _ in values_of(argument)):
            if id(argument) not in self.structs:
                changed = {f.name: self.one(getattr(argument, f.name)) for f in fields(argument)}
                self.structs[id(argument)] = replace(argument, **changed)  # type: ignore[type-var]
            return self.structs[id(argument)]
        return argument

    def value(self, value: Value) -> Tensor:
        whole = self.tensors[value.root]
        if value.root is value:
            return whole
        shape, start = value.concrete_shape(self.sizes), concrete(value.offset, self.sizes)
        return whole.view(-1)[start : start + prod(shape)].view(shape)
