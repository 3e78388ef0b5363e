"""GGUF files byte by byte, right or wrong."""

import struct

from gguf import GGUFValueType as Type


def text(value):
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key, kind, value):
    return text(key) + struct.pack("<I", kind) + value


def array(key, kind, count, data=b""):
    return pair(key, Type.ARRAY, struct.pack("<IQ", kind, count) + data)


def u32(value):
    return struct.pack("<I", value)


def info(name="w", shape=(4,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file_bytes(pairs=(), infos=(), data=b"", version=3, num_pairs=None, num_infos=None, magic=b"GGUF", alignment=32):
    counts = (len(infos) if num_infos is None else num_infos, len(pairs) if num_pairs is None else num_pairs)
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(infos)
    return header + b"\0" * (-len(header) % alignment) + data
