"""The tokenizer of a GGUF file: byte-level BPE as a tokenizer.json, sentencepiece's BPE as a sentencepiece model.

Both go through the readers of those files, and so through the libraries that the models were trained with.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from .files import ModelError
from .gguf_file import GGUFFile
from .gguf_header import shown
from .json_tokenizer import MAX_SIZE, spec_tokenizer
from .pre_tokenizers import PRE_TOKENIZERS
from .sentencepiece_model import BYTE, CONTROL, UNKNOWN, USER_DEFINED, bpe_model
from .sentencepiece_tokenizer import model_tokenizer
from .tokenizer import Tokenizer
from .tokenizer_config import TokenizerConfig

NORMAL = 1
KEYS = "tokenizer.ggml."
ENDS = ("bos", "eos", "eot", "eom")  # their tokens are control tokens whatever their type says
PADDING = re.compile(r"\[PAD[0-9]+\]")  # what converters fill a vocabulary with up to the rows of the embedding
LOOKS_LIKE_CONTROL = re.compile(r"<\|.*\|>|<｜.*｜>|</?s>", re.DOTALL)  # older converters call such tokens user-defined


def gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """Raises ModelError naming the key that is missing, malformed or of a kind that is not implemented."""
    model = file.get(KEYS + "model", str)
    if model not in ("gpt2", "llama"):
        raise file.refuse(KEYS + "model", "gpt2 or llama")
    strings = _strings(file)
    kinds = _kinds(file, strings)
    while strings and kinds[-1] != NORMAL and PADDING.fullmatch(strings[-1]):
        strings.pop()
        kinds.pop()
    return (_byte_level if model == "gpt2" else _sentencepiece)(file, strings, kinds)


def _byte_level(file: GGUFFile, strings: list[str], kinds: list[int]) -> Tokenizer:
    name = file.get(KEYS + "pre", str)
    if name not in PRE_TOKENIZERS:
        raise file.refuse(KEYS + "pre", " or ".join(PRE_TOKENIZERS))
    pre, plain = PRE_TOKENIZERS[name], {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    spec = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": strings[i], "special": kind != USER_DEFINED, **plain}
            for i, kind in enumerate(kinds)
            if kind in (CONTROL, UNKNOWN, USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if pre.composed else None,
        "pre_tokenizer": pre.spec,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {
            "type": "BPE",
            "vocab": {string: i for i, string in enumerate(strings)},
            "merges": _merges(file),
            "ignore_merges": pre.whole_words,
        },
    }
    return spec_tokenizer(spec, file.path, _config(file, strings, pre.add_bos))


def _sentencepiece(file: GGUFFile, strings: list[str], kinds: list[int]) -> Tokenizer:
    scores = file.metadata.get(KEYS + "scores")
    if not isinstance(scores, np.ndarray) or len(scores) < len(strings) or not np.isfinite(scores).all():
        raise ModelError(f"{file.path}: {KEYS}scores must be a finite number for each of {len(strings)} tokens")
    pieces = zip(strings, scores.astype(np.float32).tolist(), kinds, strict=False)
    data = bpe_model(
        pieces,
        byte_fallback=BYTE in kinds,
        dummy_prefix=file.get(KEYS + "add_space_prefix", bool, True),
        remove_extra_spaces=file.get(KEYS + "remove_extra_whitespaces", bool, False),
    )
    return model_tokenizer(data, file.path, _config(file, strings, True))


def _strings(file: GGUFFile) -> list[str]:
    strings = file.metadata.get(KEYS + "tokens")
    if not isinstance(strings, list) or not 0 < len(strings) <= MAX_SIZE:
        raise ModelError(f"{file.path}: {KEYS}tokens must be from 1 to {MAX_SIZE} strings")
    if len(set(strings)) != len(strings) or "" in strings:
        raise ModelError(f"{file.path}: {KEYS}tokens has an empty string or one twice")
    return list(strings)


def _kinds(file: GGUFFile, strings: Sequence[str]) -> list[int]:
    """A type for each token, CONTROL for those that end or begin a text."""
    given = file.metadata.get(KEYS + "token_type")
    if not isinstance(given, np.ndarray) or given.dtype.kind not in "iu" or len(given) < len(strings):
        raise ModelError(f"{file.path}: {KEYS}token_type must be an integer for each of {len(strings)} tokens")
    kinds: list[int] = given[: len(strings)].tolist()
    if strange := set(kinds) - set(range(NORMAL, BYTE + 1)):
        raise ModelError(f"{file.path}: {KEYS}token_type holds {min(strange)}, must be from {NORMAL} to {BYTE}")
    for i in (_id(file, end, len(strings)) for end in ENDS):
        if i is not None:
            kinds[i] = CONTROL
    for i, kind in enumerate(kinds):
        if kind == USER_DEFINED and LOOKS_LIKE_CONTROL.fullmatch(strings[i]):
            kinds[i] = CONTROL
    return kinds


def _merges(file: GGUFFile) -> list[list[str]]:
    merges = file.metadata.get(KEYS + "merges")
    if not isinstance(merges, list):
        raise ModelError(f"{file.path}: {KEYS}merges must be strings")
    pairs = []
    for merge in merges:
        cut = merge.find(" ", 1)  # a token may be a space
        if cut < 0:
            raise ModelError(f"{file.path}: {KEYS}merges holds {shown(merge)}, must be two tokens and a space between")
        pairs.append([merge[:cut], merge[cut + 1 :]])
    return pairs


def _id(file: GGUFFile, end: str, size: int) -> int | None:
    key = f"{KEYS}{end}_token_id"
    value: int | None = file.get(key, int)
    if value is not None and not 0 <= value < size:
        raise file.refuse(key, f"a token id below {size}")
    return value


def _config(file: GGUFFile, strings: Sequence[str], add_bos: bool) -> TokenizerConfig:
    ends: dict[str, Any] = {end: _id(file, end, len(strings)) for end in ("bos", "eos")}
    return TokenizerConfig(
        bos_token=None if ends["bos"] is None else strings[ends["bos"]],
        eos_token=None if ends["eos"] is None else strings[ends["eos"]],
        add_bos=file.get(KEYS + "add_bos_token", bool, add_bos),
    )
