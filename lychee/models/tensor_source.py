"""TensorSource: the face of everything that weights are read from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from lychee.kernels.types import Int4Weight, Int8Weight

from .safetensors_io import TensorEntry

QuantizedWeight = Int8Weight | Int4Weight
Weights = Iterator[tuple[str, Tensor | QuantizedWeight]]


class TensorSource(Protocol):
    """Tensors of a model, of whatever format, by their Hugging Face names.

    An entry's shape is the logical one, [out_features, in_features]; its dtype names a float of safetensors (F32, F16,
    BF16) or, for quantised tensors, their format.
    """

    @property
    def path(self) -> Path: ...

    @property
    def entries(self) -> Mapping[str, TensorEntry]: ...

    def read(self, names: Sequence[str]) -> Weights:
        """The tensors, in any order. They may be backed by mapped files."""
        ...


def read_joined(
    source: TensorSource,
    parts: Mapping[str, Mapping[str, str]],
    names: Sequence[str],
    join: Callable[[str, dict[str, Tensor]], QuantizedWeight],
) -> Weights:
    """Tensors of a source in which some are stored in parts: `parts[name]` has each part's name there.

    `join` makes a weight of its name and its parts.
    """
    yield from source.read([name for name in names if name not in parts])
    for name in names:
        if stored := parts.get(name):
            tensors = dict(source.read(list(stored.values())))
            found = {part: tensors[full] for part, full in stored.items()}
            yield name, join(name, {part: tensor for part, tensor in found.items() if isinstance(tensor, Tensor)})
