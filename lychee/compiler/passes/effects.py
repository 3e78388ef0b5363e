"""What a call reads and writes, for passes that move calls past others."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from ..program import Call, Value


def mutates(call: Call) -> bool:
    """Whether the call writes one of its arguments in place."""
    return any(spec.mutated for spec in call.op.contract.specs())


def may_move(call: Call, past: tuple[Call, ...]) -> bool:
    """Whether a call that writes nothing in place gives the same behind calls that come after it."""
    return not mutates(call) and not any(_written(other) & memory_of(call.arguments) for other in past)


def memory_of(argument: Any) -> set[Hashable]:
    """Values, by their roots, and the storages of constants; of structs and mappings those of all within."""
    if isinstance(argument, Value):
        return {argument.root}
    if isinstance(argument, Tensor):
        return {argument.untyped_storage().data_ptr()}
    if is_dataclass(argument):
        argument = {field.name: getattr(argument, field.name) for field in fields(argument)}
    return set().union(*map(memory_of, argument.values())) if isinstance(argument, dict) else set()


def _written(call: Call) -> set[Hashable]:
    """The memory of the arguments that are written in place."""
    contract = call.op.contract
    found: set[Hashable] = set()
    for key, argument in call.arguments.items():
        if key in contract.inputs:
            changed = contract.inputs[key].mutated
        else:
            changed = key in contract.structs and any(s.mutated for s in contract.struct_specs(key)[0].values())
        if changed:
            found |= memory_of(argument)
    return found
