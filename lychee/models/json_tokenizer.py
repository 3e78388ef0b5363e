"""Tokenizers of `tokenizer.json` files: byte-level BPE (Llama 3) and BPE with sentencepiece's conventions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from .files import ModelError, parse_json, read_text
from .tokenizer import Tokenizer
from .tokenizer_config import TokenizerConfig

MAX_SIZE = 1 << 22  # ids; tables are allocated for all of them
PROBE = "Aé 1\n"  # what any tokenizer can take
Library = tokenizers.Tokenizer
Spec = dict[str, Any]  # a component of tokenizer.json


@dataclass(frozen=True)
class JsonEncoder:
    """One file opened three ways: control strings as text, as tokens, and as tokens without the dummy prefix."""

    as_text: Library
    as_tokens: Library
    as_rest: Library

    def plain(self, text: str) -> list[int]:
        return _ids(self.as_text, text)

    def marked(self, text: str, start: bool) -> list[int]:
        return _ids(self.as_tokens if start else self.as_rest, text)


def _ids(library: Library, text: str) -> list[int]:
    """Raises ValueError where the file's patterns take more steps than the library allows, which is a panic."""
    try:
        return list(library.encode(text, add_special_tokens=False).ids)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"text cannot be encoded by this tokenizer: {str(error)[:300]}") from error


def json_tokenizer(file: Path, config: TokenizerConfig) -> Tokenizer:
    """Raises ModelError where the file is no tokenizer, or one of a kind whose tokens cannot be mapped to bytes."""
    return spec_tokenizer(parse_json(read_text(file), str(file)), file, config)


def spec_tokenizer(spec: Spec, file: Path, config: TokenizerConfig) -> Tokenizer:
    """As `json_tokenizer`, of what a tokenizer.json holds; `file` names it in errors."""
    kind = _section(spec, "model").get("type", "BPE")
    if kind != "BPE":
        raise ModelError(f"{file}: model type is {str(kind)[:80]}, must be BPE")
    as_tokens = _open(spec, file)
    decoder = ByteDecoder.of(spec.get("decoder"), str(file))
    added = {t.content: (i, t.special) for i, t in as_tokens.get_added_tokens_decoder().items()}
    ids = as_tokens.get_vocab(with_added_tokens=True)
    if not ids or max(ids.values()) >= MAX_SIZE:
        raise ModelError(f"{file}: token ids reach {max(ids.values(), default=0)}, may reach {MAX_SIZE - 1}")
    strings = [""] * (max(ids.values()) + 1)
    for string, i in ids.items():
        strings[i] = string

    def named(key: str, token: str | None) -> int | None:
        if token is not None and token not in ids:
            raise ModelError(f"{file.parent}: {key} is {token[:80]!r}, which is not in the vocabulary")
        return None if token is None else ids[token]

    ends = {"bos_token": config.bos_token, "eos_token": config.eos_token}
    bos_id, eos_id = (named(key, token) for key, token in ends.items())
    unknown = spec["model"].get("unk_token")
    special = {content: i for content, (i, is_special) in added.items() if is_special or content in ends.values()}
    with _refusing(file):
        add_bos = as_tokens.encode("").ids[:1] == [bos_id] if config.add_bos is None else config.add_bos
    rest = _without_prefix(spec)
    return Tokenizer(
        strings=tuple(strings),
        pieces=tuple(s.encode() if s in added else decoder.piece_bytes(s) for s in strings),
        control={content: i for content, i in special.items() if content != unknown},
        special_ids=frozenset(special.values()),
        bos_id=bos_id,
        eos_id=eos_id,
        add_bos=add_bos and bos_id is not None,
        strips_prefix=decoder.strips_prefix,
        encoder=JsonEncoder(
            as_text=_as_text(spec, special, file),
            as_tokens=as_tokens,
            as_rest=as_tokens if rest == spec else _open(rest, file),
        ),
    )


def _section(spec: Spec, key: str) -> Spec:
    value = spec.get(key)
    return value if isinstance(value, dict) else {}


def _open(spec: Spec, file: Path) -> Library:
    with _refusing(file):
        opened = Library.from_str(json.dumps(spec))
        opened.no_truncation()
        opened.no_padding()
        opened.encode(PROBE, add_special_tokens=False)
    return opened


@contextmanager
def _refusing(file: Path) -> Iterator[None]:
    """What the library cannot do with the file is a ModelError."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception; what it did not expect, a panic, is none
        raise ModelError(f"{file} is not a tokenizer: {str(error)[:300]}") from error


def _as_text(spec: Spec, special: Mapping[str, int], file: Path) -> Library:
    """The tokenizer that leaves control strings alone, also those that the file forgot to flag as special."""
    added = [{**token, "special": token["content"] in special} for token in spec.get("added_tokens", [])]
    opened = _open({**spec, "added_tokens": added}, file)
    opened.encode_special_tokens = True
    return opened


def _without_prefix(component: Any) -> Any:
    """The spec with every normalizer and pre-tokenizer that prepends a space told not to."""
    if isinstance(component, list):
        return [_without_prefix(c) for c in component if not (isinstance(c, dict) and c.get("type") == "Prepend")]
    if not isinstance(component, dict):
        return component
    if component.get("type") == "Prepend":
        return None
    if component.get("type") == "Metaspace":
        return {**component, "prepend_scheme": "never"}
    if component.get("type") == "ByteLevel":
        return {**component, "add_prefix_space": False}
    inner = ("normalizer", "normalizers", "pre_tokenizer", "pretokenizers")
    return {key: _without_prefix(value) if key in inner else value for key, value in component.items()}


@dataclass(frozen=True)
class ByteDecoder:
    """The bytes that vocabulary strings stand for. `strips_prefix`: a text's first space is a dummy prefix."""

    piece_bytes: Callable[[str], bytes]
    strips_prefix: bool

    @classmethod
    def of(cls, spec: Spec | None, where: str) -> ByteDecoder:
        """Read the `decoder` section. Raises ModelError naming a type that has no byte mapping."""
        spec = spec or {"type": "null"}
        parts = spec.get("decoders", []) if spec.get("type") == "Sequence" else [spec]
        if [p.get("type") for p in parts] == ["ByteLevel"]:
            return cls(_byte_level, False)
        byte_fallback, strips_prefix = False, False
        space: str | None = None
        for part in parts:
            match part:
                case {"type": "Metaspace", "replacement": str(space)}:
                    strips_prefix = part.get("prepend_scheme", "always") != "never"
                case {"type": "Replace", "pattern": {"String": str(space)}, "content": " "}:
                    pass
                case {"type": "ByteFallback"}:
                    byte_fallback = True
                case {"type": "Fuse"}:
                    pass
                case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                    strips_prefix = bool(start)
                case _:
                    raise ModelError(
                        f"{where}: decoder {json.dumps(part)[:120]} cannot be mapped to bytes, must be ByteLevel, "
                        "Metaspace, or Replace of the space, ByteFallback, Fuse and Strip of the first space"
                    )

        def piece_bytes(string: str) -> bytes:
            if byte_fallback and (byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", string)):
                return bytes.fromhex(byte[1])
            return (string.replace(space, " ") if space else string).encode()

        return cls(piece_bytes, strips_prefix)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes stand for themselves, the others for the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


def _byte_level(string: str) -> bytes:
    if all(char in BYTE_ALPHABET for char in string):
        return bytes(BYTE_ALPHABET[char] for char in string)
    return string.encode()
