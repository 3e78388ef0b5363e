"""Checkpoints of other quantisers, whose layers hold `x.qweight`, `x.qzeros` and `x.scales` in the place of `x.weight`.

w = scales * (q - zero), a scale and a zero for each group of neighbouring in_features. A layout (gptq.py, awq.py) knows
how the q and zeros are packed; from here on they are lychee's own weights, with the same values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from .files import ModelError
from .quant_format import HEAD, PROJECTION
from .safetensors_io import Checkpoint, TensorEntry, listed
from .tensor_source import QuantizedWeight, Weights, read_joined

PARTS = ("qweight", "qzeros", "scales", "g_idx")
FLOATS = ("F16", "BF16", "F32")


class Layout(Protocol):
    @property
    def name(self) -> str:
        """The dtype of entries."""
        ...

    def shapes(self, out_features: int, in_features: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """dtype and shape of every part; "F" is any float. Parts that may be missing are included."""
        ...

    def in_features(self, qweight: tuple[int, ...]) -> int: ...

    def group(self, in_features: int) -> int: ...

    def convert(self, where: str, parts: Mapping[str, Tensor]) -> QuantizedWeight: ...


@dataclass(frozen=True)
class PackedCheckpoint:
    """`parts`: the names of the parts of every tensor that is quantised."""

    checkpoint: Checkpoint
    layout: Layout
    entries: Mapping[str, TensorEntry]
    parts: Mapping[str, Mapping[str, str]]

    @classmethod
    def open(cls, path: Path, layout: Layout, config_values: Mapping[str, Any]) -> PackedCheckpoint:
        """Raises ModelError naming what is missing or wrong. Biases of nothing but zeros are left out: old quantisers
        wrote one for every layer."""
        checkpoint = Checkpoint.open(path)
        parts: dict[str, dict[str, str]] = {}
        entries: dict[str, TensorEntry] = {}
        for name, entry in checkpoint.entries.items():
            base, _, part = name.rpartition(".")
            weight = f"{base}.weight"
            if part in PARTS and (weight == HEAD or PROJECTION.fullmatch(weight)):
                parts.setdefault(weight, {})[part] = name
            else:
                entries[name] = entry
        if not parts:
            raise ModelError(f"{path} has no layer with a qweight, which its quantization_config says it has")
        spare = set(_spare_biases(checkpoint, list(parts), config_values))
        entries = {name: entry for name, entry in entries.items() if name not in spare}
        for weight, found in parts.items():
            if weight in entries:
                raise ModelError(f"{entries[weight].file}: {weight} is stored both as it is and as {listed([*found])}")
            entries[weight] = _checked(weight, {part: checkpoint.entries[n] for part, n in found.items()}, layout)
        return cls(checkpoint, layout, entries, parts)

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    def read(self, names: Sequence[str]) -> Weights:
        """Raises ModelError where a layer's numbers have no place in lychee's weights."""
        return read_joined(self.checkpoint, self.parts, names, self._joined)

    def _joined(self, name: str, found: dict[str, Tensor]) -> QuantizedWeight:
        where = f"{self.entries[name].file}: {name.removesuffix('.weight')}"
        if not found["scales"].isfinite().all():
            raise ModelError(f"{where}.scales must be finite")
        return self.layout.convert(where, found)


def _checked(weight: str, parts: Mapping[str, TensorEntry], layout: Layout) -> TensorEntry:
    """The logical entry of a layer, whose parts are complete and of the shapes and dtypes they need."""
    file = next(iter(parts.values())).file
    where = f"{file}: {weight.removesuffix('.weight')}"
    if missing := {"qweight", "qzeros", "scales"} - set(parts):
        raise ModelError(f"{where} lacks {listed(list(missing))}, has {listed(list(parts))}")
    qweight, scales = parts["qweight"].shape, parts["scales"].shape
    if len(qweight) != 2 or len(scales) != 2 or 0 in (*qweight, *scales):
        raise ModelError(f"{where} has a qweight {list(qweight)} and scales {list(scales)}, must be matrices")
    out_features, in_features = scales[1], layout.in_features(qweight)
    group = layout.group(in_features)
    if in_features % 32 or group % 32 or in_features % group:
        raise ModelError(f"{where} has {in_features} in_features in groups of {group}, must be multiples of 32")
    expected = layout.shapes(out_features, in_features)
    for part, entry in parts.items():
        if part not in expected:
            raise ModelError(f"{where} has a {part}, {layout.name} has {listed(list(expected))}")
        dtype, shape = expected[part]
        if entry.shape != shape or entry.dtype not in (FLOATS if dtype == "F" else (dtype,)):
            raise ModelError(
                f"{where}.{part} is {entry.dtype} {list(entry.shape)}, must be "
                f"{' or '.join(FLOATS) if dtype == 'F' else dtype} {list(shape)} for {layout.name}"
            )
    return TensorEntry(file, layout.name, (out_features, in_features))


def _spare_biases(checkpoint: Checkpoint, weights: list[str], config_values: Mapping[str, Any]) -> Iterator[str]:
    """Biases of quantised layers that are zero throughout and that the config does not ask for."""
    qwen2 = config_values.get("model_type") == "qwen2"
    for weight in weights:
        name = f"{weight.removesuffix('weight')}bias"
        flag = "mlp_bias" if ".mlp." in name else "attention_bias"
        wanted = config_values.get(flag) is True or (
            qwen2 and name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias"))
        )
        if name in checkpoint.entries and not wanted and checkpoint.entries[name].dtype in FLOATS:
            ((_, bias),) = checkpoint.read([name])
            if not bias.any():
                yield name
