"""Reads the specs of tensors out of annotations."""

from __future__ import annotations

import types as pytypes
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from .types import Spec


def members(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the hint alone."""
    return get_args(hint) if get_origin(hint) in (Union, pytypes.UnionType) else (hint,)


def spec_of(hint: Any) -> Spec | None:
    """The Spec inside `Annotated[Tensor, Spec]` or `Annotated[Tensor, Spec] | None`."""
    annotated = (h for h in members(hint) if get_origin(h) is Annotated)
    return next((m for h in annotated for m in h.__metadata__ if isinstance(m, Spec)), None)


def optional_of(hints: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(k for k, hint in hints.items() if pytypes.NoneType in members(hint))


@cache
def struct_specs(struct: type) -> tuple[dict[str, Spec], frozenset[str]]:
    hints = get_type_hints(struct, include_extras=True)
    return {f.name: s for f in fields(struct) if (s := spec_of(hints[f.name]))}, optional_of(hints)
