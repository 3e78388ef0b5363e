"""GGUF files: metadata and tensors' places, checked against the file's size before anything is allocated.

Format: magic, version, counts, metadata as typed key-value pairs, tensor infos, then the data, aligned
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). The header is read here and not by the `gguf` package's
GGUFReader: that slices a map without asking whether the slice is as long as it should be, loops as often as an array
claims to have elements, and checks neither where tensors end nor whether they overlap. The package gives the names of
the types, the sizes of their blocks, and (gguf_tensors.py) their values.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from .files import ModelError
from .gguf_header import ByteReader, shown

VERSIONS = (2, 3)
KEY_BYTES, NAME_BYTES, MAX_DIMS = 65535, 64, 4  # the format's limits
MAX_THINGS = 1 << 16  # keys, and tensors, of a believable file
DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 32, 1 << 16


@dataclass(frozen=True)
class GGUFTensor:
    """`shape` is in torch's order, rows first; the bytes are `offset : offset + num_bytes` of the file."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A file's header. Metadata values are int, float, bool, str, list[str] or a numpy array of numbers."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Read and check the header of a little-endian file of version 2 or 3. Raises ModelError."""
        path = Path(path)
        if not path.is_file():
            raise ModelError(f"{path} does not exist or is no file")
        size = os.path.getsize(path)
        with open(path, "rb") as stream:
            reader = ByteReader(path, stream, size)
            num_tensors, num_keys = _start(reader)
            metadata = _metadata(reader, num_keys)
            infos = [_info(reader) for _ in range(_count(reader, "tensor", num_tensors))]
        _check_whole(path, metadata)
        alignment = _alignment(path, metadata)
        data_start = -(-reader.at // alignment) * alignment
        tensors = [_tensor(path, *info, data_start, alignment, size) for info in infos]
        _check_apart(path, tensors)
        return cls(path, metadata, {t.name: t for t in tensors})

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of a key, or `default` where it is absent. Raises ModelError where it is not of the kind."""
        value = self.metadata.get(key)
        if value is None:
            return default
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise self.refuse(key, f"of type {kind.__name__}")
        return value

    def refuse(self, key: str, allowed: str) -> ModelError:
        return ModelError(f"{self.path}: {key} is {shown(self.metadata.get(key))}, must be {allowed}")


def _start(reader: ByteReader) -> tuple[int, int]:
    """The counts of tensors and of keys, from a file that is what it should be."""
    path, magic = reader.path, reader.take(min(8, reader.left), "magic")
    if magic == b"version ":
        raise ModelError(f"{path} is a Git LFS pointer, not weights; fetch them with `git lfs pull`")
    if magic[:4] != b"GGUF" or len(magic) < 8:
        raise ModelError(f"{path} starts with {magic[:4]!r}, must start with b'GGUF'")
    version = int.from_bytes(magic[4:], "little")
    if version not in VERSIONS:
        if int.from_bytes(magic[4:], "big") in VERSIONS:
            raise ModelError(f"{path} is big-endian, must be little-endian")
        raise ModelError(f"{path} has GGUF version {version}, must be {' or '.join(map(str, VERSIONS))}")
    return reader.integer("tensor count", 8), reader.integer("key count", 8)


def _count(reader: ByteReader, what: str, given: int) -> int:
    if given > MAX_THINGS:
        raise ModelError(f"{reader.path}: {what} count is {given}, may be at most {MAX_THINGS}")
    return given


def _metadata(reader: ByteReader, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(_count(reader, "key", num_keys)):
        key = reader.text("key", KEY_BYTES)
        if key in metadata:
            raise ModelError(f"{reader.path} gives {shown(key)} twice")
        metadata[key] = reader.value(shown(key))
    return metadata


def _info(reader: ByteReader) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, number of the type, and offset within the data."""
    name = reader.text("tensor name", NAME_BYTES)
    what = f"tensor {shown(name)}"
    if (num_dims := reader.integer(what, 4)) not in range(1, MAX_DIMS + 1):
        raise ModelError(f"{reader.path}: {what} has {num_dims} dimensions, may have 1 to {MAX_DIMS}")
    dims = [reader.integer(what, 8) for _ in range(num_dims)]
    return name, tuple(reversed(dims)), reader.integer(what, 4), reader.integer(what, 8)


def _tensor(
    path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int, alignment: int, size: int
) -> GGUFTensor:
    where = f"{path}: tensor {shown(name)}"
    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise ModelError(f"{where} has type {kind}, which is not a known one") from None
    if min(shape) < 1 or shape[-1] % block:
        multiple = f" and its rows a multiple of {block}" if block > 1 else ""
        raise ModelError(f"{where} has shape {list(shape)}, sizes must be at least 1{multiple}")
    num_bytes = math.prod(shape) // block * block_bytes
    if offset % alignment:
        raise ModelError(f"{where} starts at byte {offset} of the data, must start at a multiple of {alignment}")
    if start + offset + num_bytes > size:
        raise ModelError(f"{where} would end at byte {start + offset + num_bytes} of a file of {size}")
    return GGUFTensor(name, GGMLQuantizationType(kind), shape, start + offset, num_bytes)


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise ModelError(
            f"{path}: general.alignment is {shown(value)}, must be a power of two from 8 to {MAX_ALIGNMENT}"
        )
    return value


def _check_whole(path: Path, metadata: Mapping[str, Any]) -> None:
    if metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(f"{path}: split.count is {shown(metadata['split.count'])}, must be 1: merge the parts first")
    if metadata.get("general.type", "model") != "model":
        raise ModelError(f"{path}: general.type is {shown(metadata['general.type'])}, must be model")


def _check_apart(path: Path, tensors: list[GGUFTensor]) -> None:
    names = set[str]()
    for tensor in tensors:
        if tensor.name in names:
            raise ModelError(f"{path} has two tensors {shown(tensor.name)}")
        names.add(tensor.name)
    placed = sorted(tensors, key=lambda t: t.offset)
    for before, after in pairwise(placed):
        if after.offset < before.offset + before.num_bytes:
            raise ModelError(f"{path}: tensors {shown(before.name)} and {shown(after.name)} overlap")
