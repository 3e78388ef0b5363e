"""Detokenizer: text as its tokens arrive, never half a character."""

from __future__ import annotations

import codecs

from .tokenizer import Tokenizer


class Detokenizer:
    """Joined, what `push` and `flush` return is Tokenizer.decode of all ids.

    `continuation`: the text follows other text, so the first piece's space belongs to it and is kept.
    """

    def __init__(self, tokenizer: Tokenizer, continuation: bool = False, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._strip = tokenizer.strips_prefix and not continuation
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes; bytes of an unfinished one are kept back."""
        if token_id in self._skipped:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never finished."""
        return self._utf8.decode(b"", final=True)
