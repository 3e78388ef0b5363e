"""Writes a sentencepiece model: a ModelProto with the fields that encoding reads.

Format: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto, as protocol buffers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # SentencePiece.Type, and GGUF's token types
_VARINT, _BYTES, _FLOAT = 0, 2, 5  # wire types
_BPE = 2  # TrainerSpec.ModelType


def bpe_model(
    pieces: Iterable[tuple[str, float, int]], byte_fallback: bool, dummy_prefix: bool, remove_extra_spaces: bool
) -> bytes:
    """A BPE model of (piece, score, type), the index being the id, that changes nothing of a text but its spaces."""
    made = bytearray()
    for piece, score, kind in pieces:
        made += _field(1, _field(1, piece.encode()) + _float(2, score) + _integer(3, kind))
    made += _field(2, _integer(3, _BPE) + _integer(35, byte_fallback))
    normalizer = _field(1, b"identity") + _integer(3, dummy_prefix) + _integer(4, remove_extra_spaces) + _integer(5, 1)
    return bytes(made + _field(3, normalizer))


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(content)) + content


def _integer(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value)


def _float(number: int, value: float) -> bytes:
    return _varint(number << 3 | _FLOAT) + struct.pack("<f", value)
