"""Pre-tokenizers of byte-level BPE by the names that GGUF files give them, as components of a tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]  # a component of tokenizer.json

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"  # upper or neither, lower or neither
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{LETTERS[0]}*{LETTERS[1]}+|[^\r\n\p{{L}}\p{{N}}]?{LETTERS[0]}+{LETTERS[1]}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """`patterns` split a text one after the other, matches and gaps alike. `composed`: the text is NFC first.

    `whole_words`: a word that is in the vocabulary is one token, whatever the merges say. `add_bos`: unless told.
    """

    patterns: tuple[str, ...]
    composed: bool = False
    whole_words: bool = False
    add_bos: bool = False

    @property
    def spec(self) -> Spec:
        splits = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        return {"type": "Sequence", "pretokenizers": [*splits, byte_level]}


_LLAMA3 = PreTokenizer((LLAMA3,), whole_words=True, add_bos=True)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((GPT2,)),
    "smollm": PreTokenizer((r"\p{N}", GPT2)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": PreTokenizer((QWEN2,), composed=True),
    "tekken": PreTokenizer((TEKKEN,), whole_words=True, add_bos=True),
}
