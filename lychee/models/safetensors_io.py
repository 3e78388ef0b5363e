"""Safetensors checkpoints, single or sharded: what they hold, checked against the files before anything is read.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data
(https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from lychee.nouns import counted

from .files import ModelError, parse_json, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_NAME = 200  # characters of a shard's file name
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1} | {
    f"{sign}{bits}": bits // 8 for sign in "IU" for bits in (8, 16, 32, 64)
}
ITEM_BYTES["BOOL"] = 1


@dataclass(frozen=True)
class TensorEntry:
    """One tensor's place: its file, the format's dtype name (F32, BF16, ...) and its shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """Headers of all shards, merged."""

    path: Path
    entries: Mapping[str, TensorEntry]

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Read and check the headers of `model.safetensors`, or of the shards its index names. Raises ModelError."""
        if (path / SINGLE).is_file():
            return cls(path, read_header(path / SINGLE))
        if (path / INDEX).is_file():
            return cls(path, _sharded(path))
        if not path.is_dir():
            raise ModelError(f"{path} is not a model directory")
        pickles = sorted(f.name for f in path.iterdir() if f.suffix in PICKLES)
        if pickles:
            raise ModelError(f"{path} holds {', '.join(pickles)}; pickles can run code, only safetensors are read")
        raise ModelError(f"{path} has neither {SINGLE} nor {INDEX}")

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Tensors backed by the mapped files, file by file. Copy them: a mapping dies if its file is truncated."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.entries[name].file, []).append(name)
        for file, members in by_file.items():
            with _opened(file) as tensors:
                for name in members:
                    yield name, tensors.get_tensor(name)


def _opened(file: Path) -> Any:
    """The file for the library to read, which asks of a header things that do not matter to us too."""
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except SafetensorError as error:
        raise ModelError(f"{file} is not a safetensors file: {str(error)[:300]}") from error


def _sharded(path: Path) -> dict[str, TensorEntry]:
    index = read_json(path / INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise ModelError(f"{path / INDEX}: weight_map must map tensor names to file names")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if Path(shard).name != shard or not shard.endswith(".safetensors") or len(shard) > MAX_NAME:
            raise ModelError(f"{path / INDEX} names the file {shard[:200]!r}, must be a .safetensors file beside it")
    if missing := [s for s in shards if not (path / s).is_file()]:
        lost = [name for name, file in weight_map.items() if file in missing]
        raise ModelError(f"{path} lacks {', '.join(missing)}, which should hold {listed(lost)}")
    entries: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, entry in read_header(path / shard).items():
            if name in entries:
                raise ModelError(f"{name} is in both {entries[name].file} and {entry.file}")
            entries[name] = entry
    for name, shard in weight_map.items():
        if name not in entries or entries[name].file.name != shard:
            raise ModelError(f"{path / shard} lacks {name}, which {INDEX} says it holds")
    return entries


def listed(names: list[str], most: int = 5) -> str:
    """The first few names, and how many more."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(sorted(names)[:most]) + rest


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Every tensor of one file. Lengths, offsets and sizes must fit the file, without gap or overlap."""
    size = os.path.getsize(file)
    with open(file, "rb") as stream:
        first_bytes = stream.read(8)
        if first_bytes == b"version ":
            raise ModelError(f"{file} is a Git LFS pointer, not weights; fetch them with `git lfs pull`")
        length = int.from_bytes(first_bytes, "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            most = max(min(size - 8, MAX_HEADER_BYTES), 0)
            raise ModelError(
                f"{file} says its header has {counted(length, 'byte')}, may have {most} in a file of {size}"
            )
        header = parse_json(stream.read(length), f"{file}: header")
    header.pop("__metadata__", None)
    spans, entries = [], {}
    for name, value in header.items():
        entry, span = _entry(file, name, value)
        entries[name] = entry
        spans.append((*span, name))
    end = 0
    for start, stop, name in sorted(spans):
        if start != end:
            raise ModelError(f"{file}: {name} starts at byte {start}, must start at {end}")
        end = stop
    if end != size - 8 - length:
        raise ModelError(f"{file} has {counted(size - 8 - length, 'byte')} of data, its header describes {end}")
    return entries


def _entry(file: Path, name: str, value: Any) -> tuple[TensorEntry, tuple[int, int]]:
    where = f"{file}: {name}"
    fields = value if isinstance(value, dict) else {}
    dtype, shape, span = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ModelError(f"{where} has dtype {str(dtype)[:40]}, must be one of {', '.join(ITEM_BYTES)}")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ModelError(f"{where} has shape {str(shape)[:80]}, must be a list of sizes")
    if not isinstance(span, list) or len(span) != 2 or not all(type(n) is int and n >= 0 for n in span):
        raise ModelError(f"{where} has data_offsets {str(span)[:80]}, must be [start, end]")
    if span[1] - span[0] != math.prod(shape) * ITEM_BYTES[dtype]:
        needed = math.prod(shape) * ITEM_BYTES[dtype]
        raise ModelError(f"{where} is given {counted(span[1] - span[0], 'byte')}, its {dtype} {shape} needs {needed}")
    return TensorEntry(file, dtype, tuple(shape)), (span[0], span[1])
