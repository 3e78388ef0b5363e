"""Quantises a model directory ahead of time: a new directory that is either complete or not there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lychee.kernels.types import Int8Weight

from .config import ModelConfig
from .files import ModelError, read_json
from .quant_format import QuantFormat, format_of
from .quantize import quantize, relative_error
from .quantized_checkpoint import METHOD
from .quantized_on_load import check_fits
from .safetensors_io import Checkpoint
from .safetensors_writer import SafetensorsWriter
from .tensor_source import QuantizedWeight
from .weights import check, check_tied, expected_shapes

COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
)


@dataclass(frozen=True)
class Written:
    """One tensor's part in the new directory. `error` is relative to the tensor's norm; None where it was kept."""

    name: str
    bytes_before: int
    bytes_after: int
    error: float | None


def save_quantized(
    src_dir: Path,
    out_dir: Path,
    fmt: QuantFormat,
    shard_bytes: int = 4_000_000_000,
    on_written: Callable[[Written], None] = lambda _: None,
) -> list[Written]:
    """Write `src_dir`, a model of float safetensors, to `out_dir`, with the tensors of `format_of` quantised.

    Reads, quantises and writes tensor by tensor, and calls `on_written` after each. `out_dir` may be absent or empty,
    and appears when it is complete. Raises ModelError where it holds something, or where the source is no model or is
    quantised already.
    """
    out_dir = out_dir.resolve()
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ModelError(f"{out_dir} exists, must be absent or an empty directory")
    if not out_dir.parent.is_dir():
        raise ModelError(f"{out_dir} cannot be made: the directory it would be in does not exist")
    values = read_json(src_dir / "config.json")
    if values.get("quantization_config") is not None:
        raise ModelError(f"{src_dir / 'config.json'} has a quantization_config, must be of a model that has none")
    checkpoint, names, tied = _checked(src_dir)
    check_fits(checkpoint, fmt, tied)
    partial = out_dir.parent / f".{out_dir.name}.{os.getpid()}.partial"
    partial.mkdir()
    try:
        written = []
        for tensor in _write(checkpoint, names, partial, fmt, tied, shard_bytes):
            written.append(tensor)
            on_written(tensor)
        _write_companions(src_dir, partial, values, fmt)
        partial.rename(out_dir)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return written


def _checked(src_dir: Path) -> tuple[Checkpoint, list[str], bool]:
    """The checkpoint, the tensors that the config asks for, and whether the head is tied to the embedding."""
    config, checkpoint = ModelConfig.load(src_dir), Checkpoint.open(src_dir)
    check(checkpoint, config)
    check_tied(checkpoint, config)
    return checkpoint, list(expected_shapes(config)), config.tie_word_embeddings


def _write(
    checkpoint: Checkpoint, names: list[str], out_dir: Path, fmt: QuantFormat, tied: bool, shard_bytes: int
) -> Iterator[Written]:
    writer = SafetensorsWriter(out_dir, shard_bytes)
    for name, tensor in checkpoint.read(names):
        own = format_of(name, fmt, tied)
        if own is None:
            writer.add(name, tensor)
            yield Written(name, tensor.nbytes, tensor.nbytes, None)
            continue
        made = quantize(tensor, own, f"{checkpoint.entries[name].file}: {name}")
        parts = stored_parts(made)
        for part, data in parts.items():
            writer.add(f"{name}.{part}", data)
        yield Written(name, tensor.nbytes, _bytes(parts.values()), relative_error(tensor, made))
    writer.close()


def stored_parts(weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors that a quantised one is stored as, by the ends of their names."""
    if isinstance(weight, Int8Weight):
        return {"values": weight.values, "scales": weight.scales}
    parts = {"packed": weight.packed, "scales": weight.scales, "minimums": weight.minimums}
    return {name: tensor for name, tensor in parts.items() if tensor is not None}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _write_companions(src_dir: Path, out_dir: Path, values: Mapping[str, Any], fmt: QuantFormat) -> None:
    for name in COPIED:
        if (src_dir / name).is_file():
            shutil.copyfile(src_dir / name, out_dir / name)
    settings = {"quant_method": METHOD, "format": fmt.name}
    text = json.dumps({**values, "quantization_config": settings}, indent=2, ensure_ascii=False)
    (out_dir / "config.json").write_text(text + "\n", encoding="utf-8")
