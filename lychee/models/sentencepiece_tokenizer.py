"""Tokenizers of sentencepiece `tokenizer.model` files (Llama 1 and 2, TinyLlama)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from lychee.nouns import counted

from .files import ModelError
from .tokenizer import Tokenizer
from .tokenizer_config import TokenizerConfig

MAX_BYTES = 64 << 20
SPACE = "▁"
# A second normalizer_spec (ModelProto field 3) merges into the first: add_dummy_prefix (its field 3) becomes false.
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


@dataclass(frozen=True)
class SentencePieceEncoder:
    """The library matches no control piece in text, so templates are split at the control strings here."""

    processor: SentencePieceProcessor
    without_prefix: SentencePieceProcessor
    control: Mapping[str, int]
    legacy: bool

    def plain(self, text: str) -> list[int]:
        return list(self.processor.encode(text))

    def marked(self, text: str, start: bool) -> list[int]:
        ids: list[int] = []
        strings = sorted(self.control, key=len, reverse=True)  # the longest match wins
        parts = re.split(f"({'|'.join(map(re.escape, strings))})", text) if strings else [text]
        for i, part in enumerate(parts):
            if i % 2:
                ids.append(self.control[part])
            elif part:
                prefixed = start if i == 0 else self.legacy
                ids += (self.processor if prefixed else self.without_prefix).encode(part)
        return ids


def sentencepiece_tokenizer(file: Path, config: TokenizerConfig) -> Tokenizer:
    """Raises ModelError where the file is no sentencepiece model or the config names tokens it lacks."""
    if (size := file.stat().st_size) > MAX_BYTES:
        raise ModelError(f"{file} has {counted(size, 'byte')}, may have at most {MAX_BYTES}")
    return model_tokenizer(file.read_bytes(), file, config)


def model_tokenizer(data: bytes, file: Path, config: TokenizerConfig) -> Tokenizer:
    """As `sentencepiece_tokenizer`, of a serialized model; `file` names it in errors."""
    try:
        processor = SentencePieceProcessor(model_proto=data)
        without_prefix = SentencePieceProcessor(model_proto=data + NO_DUMMY_PREFIX)
        strings = [processor.id_to_piece(i) for i in range(processor.vocab_size())]
    except (RuntimeError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} is not a sentencepiece model: {str(error)[:300]}") from error
    num_pieces = len(strings)
    pieces = [_piece_bytes(processor, i, piece) for i, piece in enumerate(strings)]
    control = {strings[i]: i for i in range(num_pieces) if processor.is_control(i)}
    special_ids = set(control.values()) | {i for i in range(num_pieces) if processor.is_unknown(i)}
    for i in sorted(config.added):
        token = config.added[i]
        if i < num_pieces:
            continue  # restates a piece of the model
        if i != len(strings):
            raise ModelError(f"{file.parent}: added token {token.content[:80]!r} has id {i}, must be {len(strings)}")
        strings.append(token.content)
        pieces.append(token.content.encode())
        control[token.content] = i
        if token.special:
            special_ids.add(i)
    ids = {string: i for i, string in enumerate(strings)}

    def named(key: str, token: str | None, own: int) -> int | None:
        if token is None:
            return own if own >= 0 else None
        if token not in ids:
            raise ModelError(f"{file.parent}: {key} is {token[:80]!r}, which is not in the vocabulary")
        return ids[token]

    bos_id = named("bos_token", config.bos_token, processor.bos_id())
    eos_id = named("eos_token", config.eos_token, processor.eos_id())
    control |= {strings[i]: i for i in (bos_id, eos_id) if i is not None}
    return Tokenizer(
        strings=tuple(strings),
        pieces=tuple(pieces),
        control=control,
        special_ids=frozenset(special_ids),
        bos_id=bos_id,
        eos_id=eos_id,
        add_bos=bos_id is not None and config.add_bos is not False,
        strips_prefix=processor.encode("a") != without_prefix.encode("a"),
        encoder=SentencePieceEncoder(processor, without_prefix, control, config.legacy),
    )


def _piece_bytes(processor: SentencePieceProcessor, token_id: int, piece: str) -> bytes:
    if processor.is_byte(token_id):
        return bytes([int(piece[1:-1], 16)])  # <0xNN>
    if processor.is_control(token_id) or processor.is_unknown(token_id):
        return piece.encode()
    return piece.replace(SPACE, " ").encode()
