"""Damage to files: of their bytes, of their JSON, of their GGUF values. A seed makes the same damage again."""

import json
import random
import struct
from copy import deepcopy
from typing import Any

from gguf import GGUFValueType as Type

NUMBERS = (0, 1, 2, 7, 31, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 64, 1 << 20, 1 << 31, 1 << 70, -(1 << 70), 0.0, -0.5, 1e-45, 1e308, float("nan")),
    *(float("inf"), "", "x", "a" * 1000, "\ud800", "\x00", "<s>", "llama3", [], {}, [[]], [None], [1, 2], {"a": 1}),
    *(["x", "y"], {"type": "BPE"}, {"String": "a"}, {"Regex": "("}, {"type": "Sequence", "decoders": []}),
)
DEEP = "a list in a list in a list"
FORMS = {Type.UINT32: "<I", Type.INT32: "<i", Type.FLOAT32: "<f", Type.UINT64: "<Q", Type.BOOL: "<B", Type.INT8: "<b"}


def damaged_bytes(content: bytes, rng: random.Random, header: int) -> bytes:
    """One to four of: flipped bits, numbers of every size, cuts, holes, repeats and noise, most in the header."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(min(rng.choice((header, header, 32, len(data))), len(data)) or 1)
        kind = rng.randrange(7)
        if not data:
            break
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at : at + 1] = bytes([rng.choice((0, 1, 0x7F, 0x80, 0xFF, *b'{}[]",:', rng.randrange(256)))])
        elif kind == 2:
            width = rng.choice((4, 8))
            data[at : at + width] = struct.pack("<Q", rng.choice(NUMBERS))[:width]
        elif kind == 3:
            del data[at if rng.random() < 0.5 else rng.randrange(len(data)) :]
        elif kind == 4:
            del data[at : at + rng.randint(1, 64)]
        elif kind == 5:
            data[at:at] = data[at : at + rng.randint(1, 256)]
        else:
            data[at:at] = rng.randbytes(rng.randint(1, 32))
    return bytes(data) if rng.random() < 0.98 else rng.randbytes(rng.randint(0, 300))


def damaged_json(content: str, rng: random.Random) -> bytes:
    """One to three of its values replaced, dropped, doubled or renamed; sometimes its text instead."""
    if rng.random() < 0.2:
        return damaged_bytes(content.encode(), rng, len(content))
    value = json.loads(content)
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = damaged_value(value, rng)
    depth = rng.choice((1, 5, 300, 900, 5000, 200000))
    return json.dumps(value).replace(json.dumps(DEEP), "[" * depth + "]" * depth).encode()


def damaged_value(value: Any, rng: random.Random) -> Any:
    """The value with something inside it, or itself, changed."""
    inside = isinstance(value, (dict, list)) and len(value) > 0
    if not inside or rng.random() < 0.05:
        return deepcopy(rng.choice(VALUES))
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    kind = rng.randrange(8)
    if kind == 0:
        if isinstance(value, dict):
            del value[key]
        else:
            value.pop(key)
    elif kind == 1 and isinstance(value, dict):
        value[rng.choice(("x", "", "type", "vocab", key + "x"))] = deepcopy(value[key])
    elif kind == 2 and isinstance(value, list):
        value.append(deepcopy(value[key]))
    elif kind == 3:
        value[key] = DEEP
    elif kind == 4:
        value[key] = deepcopy(rng.choice(VALUES))
    else:
        value[key] = damaged_value(value[key], rng)
    return value


def odd_pair(rng: random.Random) -> bytes:
    """A type and a value of it, of any length and often not the right one."""
    kind = rng.choice(list(Type))
    if kind is Type.STRING:
        return struct.pack("<I", kind) + _odd_text(rng)
    if kind is Type.ARRAY:
        inner, count = rng.choice([*Type, 77]), rng.choice((0, 1, 3, 1000, *NUMBERS))
        body = b"".join(_odd_text(rng) for _ in range(3)) if inner is Type.STRING else rng.randbytes(rng.randint(0, 64))
        return struct.pack("<IIQ", kind, inner, count) + body
    form = FORMS.get(kind)
    number = rng.choice(NUMBERS) % (1 << 31)
    return struct.pack("<I", kind) + (
        struct.pack(form, number % 127 if form in ("<B", "<b") else number) if form else rng.randbytes(8)
    )


def _odd_text(rng: random.Random) -> bytes:
    data = rng.choice((b"", b"a", b"llama", b"gpt2", b"smollm", b"default", "ſ😀".encode(), rng.randbytes(9)))
    length = len(data) if rng.random() < 0.9 else rng.choice(NUMBERS)
    return struct.pack("<Q", length) + data


def damaged_gguf(content: bytes, rng: random.Random, spans: dict[str, tuple[int, int]]) -> bytes:
    """A metadata value replaced by an odd one, or the bytes damaged. `spans`: where keys' types and values are."""
    if rng.random() < 0.5:
        return damaged_bytes(content, rng, max(stop for _, stop in spans.values()) + 600)
    start, stop = spans[rng.choice(list(spans))]
    kept = content[stop:] if rng.random() < 0.9 else content[stop + rng.randint(0, 40) :]
    return content[:start] + odd_pair(rng) + kept
