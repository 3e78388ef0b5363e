"""A checkpoint whose tensors are quantised as they are read, so that memory never holds the whole model as floats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from .files import ModelError
from .quant_format import QuantFormat, format_of
from .quantize import quantize
from .quantized_checkpoint import QuantizedCheckpoint
from .safetensors_io import TensorEntry
from .tensor_source import TensorSource, Weights

FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class QuantizedOnLoad:
    """`formats`: of the tensors that are quantised."""

    source: TensorSource
    formats: Mapping[str, QuantFormat]
    entries: Mapping[str, TensorEntry]

    @property
    def path(self) -> Path:
        return self.source.path

    def read(self, names: Sequence[str]) -> Weights:
        """As the source's. Raises ModelError where a weight is not finite."""
        for name, tensor in self.source.read(names):
            if name in self.formats and isinstance(tensor, Tensor):
                yield name, quantize(tensor, self.formats[name], f"{self.entries[name].file}: {name}")
            else:
                yield name, tensor


def quantized_on_load(source: TensorSource, fmt: QuantFormat, tied: bool) -> TensorSource:
    """`source` with the tensors of `format_of` quantised; itself where lychee quantised it to `fmt` already.

    `tied`: the head is the embedding. Raises ModelError where a tensor is quantised otherwise, or does not fit.
    """
    if isinstance(source, QuantizedCheckpoint) and source.fmt == fmt:
        return source
    formats = check_fits(source, fmt, tied)
    entries = {
        name: replace(entry, dtype=formats[name].name) for name, entry in source.entries.items() if name in formats
    }
    return QuantizedOnLoad(source, formats, {**source.entries, **entries})


def check_fits(source: TensorSource, fmt: QuantFormat, tied: bool) -> dict[str, QuantFormat]:
    """The format of every tensor that would be quantised. Raises ModelError where one is not a matrix that fits."""
    formats = {}
    for name, entry in source.entries.items():
        own = format_of(name, fmt, tied)
        if own is None:
            continue
        where = f"{entry.file}: {name}"
        if entry.dtype not in FLOATS:
            raise ModelError(f"{where} is {entry.dtype}, must be {' or '.join(FLOATS)} to be quantised to {fmt.name}")
        if len(entry.shape) != 2 or 0 in entry.shape:
            raise ModelError(f"{where} has shape {list(entry.shape)}, must be a matrix")
        if not own.fits(entry.shape[1]):
            raise ModelError(own.refusal(where, entry.shape[1]))
        formats[name] = own
    return formats
