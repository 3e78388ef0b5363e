"""TensorSource: the face of everything that weights are read from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

    def read(self, names: Iterator[str] | list[str]) -> Weights:
        """The tensors, in any order. They may be backed by mapped files."""
        ...
