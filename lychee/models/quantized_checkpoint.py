"""Checkpoints quantised by lychee: safetensors that hold a quantised tensor in two or three parts.

The int8 tensor `x.weight` is stored as `x.weight.values` (I8) and `x.weight.scales`, the int4 one as `x.weight.packed`
(U8), `x.weight.scales` and, unless it is symmetric, `x.weight.minimums`; lychee.kernels.types says what they mean.
config.json has `"quantization_config": {"quant_method": "lychee", "format": "int4-g32-min"}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lychee.kernels.types import Int4Weight, Int8Weight

from .files import ModelError
from .quant_format import PROJECTION, QuantFormat, format_of
from .safetensors_io import Checkpoint, TensorEntry, listed
from .tensor_source import QuantizedWeight, Weights, read_joined

METHOD = "lychee"
PARTS = ("values", "packed", "scales", "minimums")
SCALES = ("F16", "F32")


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """`parts`: the tensors that are quantised, with the names of their parts."""

    checkpoint: Checkpoint
    fmt: QuantFormat
    entries: Mapping[str, TensorEntry]
    parts: Mapping[str, Mapping[str, str]]

    @classmethod
    def open(cls, path: Path, settings: Mapping[str, Any]) -> QuantizedCheckpoint:
        """`settings` are the config's quantization_config. Raises ModelError naming what is missing or wrong."""
        fmt = _format(path, settings)
        checkpoint = Checkpoint.open(path)
        parts: dict[str, dict[str, str]] = {}
        entries: dict[str, TensorEntry] = {}
        for name, entry in checkpoint.entries.items():
            whole, _, part = name.rpartition(".")
            if part in PARTS:
                parts.setdefault(whole, {})[part] = name
            else:
                entries[name] = entry
        for name, found in parts.items():
            entries[name] = _checked(name, {p: checkpoint.entries[n] for p, n in found.items()}, fmt, name in entries)
        if floats := [name for name in entries if PROJECTION.fullmatch(name) and name not in parts]:
            raise ModelError(f"{path}: {listed(floats)} must be stored as {fmt.name}, which config.json says")
        return cls(checkpoint, fmt, entries, parts)

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    def read(self, names: Sequence[str]) -> Weights:
        """Tensors backed by the mapped files. Raises ModelError where a scale is not finite."""
        return read_joined(
            self.checkpoint, self.parts, names, lambda name, found: _weight(self.entries[name], name, found)
        )


def _format(path: Path, settings: Mapping[str, Any]) -> QuantFormat:
    where = f"{path / 'config.json'}: quantization_config"
    if unknown := sorted(set(settings) - {"quant_method", "format"}):
        raise ModelError(f"{where} has {listed(unknown)[:200]}, may have quant_method and format")
    if not isinstance(settings.get("format"), str):
        raise ModelError(f"{where}.format is {str(settings.get('format'))[:80]!r}, must be a string")
    try:
        return QuantFormat.parse(settings["format"])
    except ValueError as error:
        raise ModelError(f"{where}: {error}") from error


def _checked(name: str, parts: Mapping[str, TensorEntry], fmt: QuantFormat, also_whole: bool) -> TensorEntry:
    """The logical entry of one quantised tensor, whose parts are complete and of the shapes and dtypes they need."""
    entry = next(iter(parts.values()))
    where = f"{entry.file}: {name}"
    own = format_of(name, fmt, tied=True)
    if own is None:
        raise ModelError(f"{where} is stored in the parts {listed(list(parts))}, must be a tensor of floats")
    if also_whole:
        raise ModelError(f"{where} is stored both as it is and in the parts {listed(list(parts))}")
    data = "values" if own.bits == 8 else "packed"
    needed = {data, "scales"} | ({"minimums"} if own.kind != "sym" else set())
    if set(parts) != needed:
        raise ModelError(f"{where} has the parts {listed(list(parts))}, {own.name} has {listed(list(needed))}")
    stored, scales = parts[data], parts["scales"]
    dtype = "I8" if own.bits == 8 else "U8"
    if stored.dtype != dtype or len(stored.shape) != 2 or 0 in stored.shape:
        raise ModelError(f"{where}.{data} is {stored.dtype} {list(stored.shape)}, must be a matrix of {dtype}")
    out_features, in_features = stored.shape[0], stored.shape[1] * 8 // own.bits
    if not own.fits(in_features):
        raise ModelError(own.refusal(where, in_features))
    groups = (out_features, in_features // own.group if own.group else 1)
    for part in needed - {data}:
        if parts[part].shape != groups or parts[part].dtype != scales.dtype or scales.dtype not in SCALES:
            raise ModelError(
                f"{where}.{part} is {parts[part].dtype} {list(parts[part].shape)}, must be {' or '.join(SCALES)} "
                f"{list(groups)}, of one dtype with the scales"
            )
    return TensorEntry(stored.file, own.name, (out_features, in_features))


def _weight(entry: TensorEntry, name: str, parts: Mapping[str, Tensor]) -> QuantizedWeight:
    for part in ("scales", "minimums"):
        if part in parts and not parts[part].isfinite().all():
            raise ModelError(f"{entry.file}: {name}.{part} must be finite")
    if "values" in parts:
        return Int8Weight(parts["values"], parts["scales"])
    return Int4Weight(parts["packed"], parts["scales"], parts.get("minimums"))
