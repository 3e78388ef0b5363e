"""ByteReader: the values of a GGUF header, none of them longer than what is left of the file."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGUFValueType

from lychee.nouns import counted

from .files import ModelError

MAX_HEADER_BYTES = 64 << 20  # a vocabulary of 256k tokens with its merges has 16 MB
SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "|b1",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


def shown(value: Any) -> str:
    """A name or a value from a file, short enough and printable for a sentence."""
    return value[:80] if isinstance(value, str) and value.isprintable() and value else repr(value)[:80]


@dataclass
class ByteReader:
    """`at` is the byte to be read next. `stream` is buffered and at byte 0; `size` is the file's."""

    path: Path
    stream: BinaryIO
    size: int
    at: int = field(default=0, init=False)

    @property
    def left(self) -> int:
        """Bytes that the header may still have."""
        return min(self.size, MAX_HEADER_BYTES) - self.at

    def take(self, num_bytes: int, what: str) -> bytes:
        if num_bytes > self.left:
            raise ModelError(
                f"{self.path}: {what} needs {counted(num_bytes, 'byte')} at byte {self.at}, "
                f"where the header may have {self.left}"
            )
        data = self.stream.read(num_bytes)
        if len(data) != num_bytes:
            raise ModelError(f"{self.path} was cut to {counted(self.at + len(data), 'byte')} while it was read")
        self.at += num_bytes
        return data

    def integer(self, what: str, num_bytes: int) -> int:
        return int.from_bytes(self.take(num_bytes, what), "little")

    def text(self, what: str, most: int = MAX_HEADER_BYTES) -> str:
        if (length := self.integer(what, 8)) > most:
            raise ModelError(f"{self.path}: {what} has {counted(length, 'byte')}, may have at most {most}")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: {what} is not UTF-8: {error}") from None

    def value(self, what: str) -> Any:
        """A value after its type: int, float, bool, str, list[str], or a numpy array of numbers."""
        kind = self._kind(what)
        if kind is GGUFValueType.STRING:
            return self.text(what)
        if kind is not GGUFValueType.ARRAY:
            return self._numbers(what, kind, 1)[0].item()
        kind, length = self._kind(what), self.integer(what, 8)
        if kind is GGUFValueType.ARRAY:
            raise ModelError(f"{self.path}: {what} is an array of arrays, must be one of strings or numbers")
        if kind is not GGUFValueType.STRING:
            return self._numbers(what, kind, length)
        return self._texts(what, length)

    def _texts(self, what: str, length: int) -> list[str]:
        """`length` strings; a loop of few calls, as there are hundreds of thousands."""
        read, unpack, made, left = self.stream.read, struct.Struct("<Q").unpack, [], self.left
        for i in range(length):
            head = read(8) if left >= 8 else b""
            size = unpack(head)[0] if len(head) == 8 else MAX_HEADER_BYTES
            left -= 8 + size
            data = read(size) if left >= 0 else b""
            if len(data) != size:
                raise ModelError(f"{self.path}: element {i} of {what} goes past the end of the header or the file")
            try:
                made.append(data.decode())
            except UnicodeDecodeError as error:
                raise ModelError(f"{self.path}: element {i} of {what} is not UTF-8: {error}") from None
        self.at += self.left - left
        return made

    def _kind(self, what: str) -> GGUFValueType:
        number = self.integer(what, 4)
        try:
            return GGUFValueType(number)
        except ValueError:
            raise ModelError(f"{self.path}: {what} has value type {number}, which is not a known one") from None

    def _numbers(self, what: str, kind: GGUFValueType, length: int) -> np.ndarray[Any, np.dtype[Any]]:
        dtype = np.dtype(SCALARS[kind])
        data = self.take(length * dtype.itemsize, what)
        if kind is GGUFValueType.BOOL and data.strip(b"\0\1"):
            raise ModelError(f"{self.path}: {what} has a byte above 1, must be true (1) or false (0)")
        return np.frombuffer(data, dtype)
