"""Tokenizer: text to ids and back, one interface over sentencepiece and tokenizer.json files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

# Stands inside a control string that a user wrote into a chat message, so that it is not taken for a control token. A
# lone surrogate: no valid text holds one.
BREAK = "\udc00"


class Encoder(Protocol):
    """What a tokenizer library does for us; neither method adds a BOS."""

    def plain(self, text: str) -> list[int]:
        """Text from users: control strings are ordinary text."""
        ...

    def marked(self, text: str, start: bool) -> list[int]:
        """Rendered templates: control strings are control tokens. `start` False continues a text: no dummy prefix."""
        ...


@dataclass(frozen=True)
class Tokenizer:
    """`strings[i]` is token i as its vocabulary spells it, `pieces[i]` the bytes it stands for.

    `control` are the strings that only a template may turn into their ids; `special_ids` are left out of shown text.
    `strips_prefix`: the first piece of a text starts with a space that is not part of it.
    """

    strings: tuple[str, ...] = field(repr=False)
    pieces: tuple[bytes, ...] = field(repr=False)
    control: Mapping[str, int] = field(repr=False)
    special_ids: frozenset[int]
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    strips_prefix: bool
    encoder: Encoder = field(repr=False)

    @property
    def size(self) -> int:
        """Number of ids. A model's vocabulary may be padded beyond it."""
        return len(self.strings)

    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        """Ids of a user's text, in which control strings are text. `add_bos` None does what the model wants.

        Raises ValueError where the text holds a lone surrogate, spells a control token that has no other encoding, or
        is more than the tokenizer's patterns can take.
        """
        check_text(text, "text")
        ids = self.encoder.plain(text)
        if not self._control_ids.isdisjoint(ids):
            found = next(i for i in ids if i in self._control_ids)
            raise ValueError(f"text holds {self.strings[found]!r}, which this tokenizer cannot encode as plain text")
        return self._with_bos(ids, self.add_bos if add_bos is None else add_bos)

    def encode_chat(self, rendered: str) -> list[int]:
        """Ids of a rendered chat template, control strings included. A BOS is the template's to emit: none is added."""
        first, *rest = rendered.split(BREAK)
        check_text("".join([first, *rest]), "rendered")
        ids = self.encoder.marked(first, start=True)
        for part in rest:
            ids += self.encoder.marked(part, start=False)
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True, continuation: bool = False) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD. `continuation` keeps the first piece's space."""
        data = b"".join(self.token_bytes(i) for i in ids if not (skip_special and i in self.special_ids))
        if self.strips_prefix and not continuation:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def token_string(self, token_id: int) -> str:
        return self.strings[self._checked(token_id)]

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[self._checked(token_id)]

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        return frozenset(self.control.values())

    def _checked(self, token_id: int) -> int:
        if not 0 <= token_id < self.size:
            raise ValueError(f"token id is {token_id}, must be from 0 to {self.size - 1}")
        return token_id

    def _with_bos(self, ids: list[int], wanted: bool) -> list[int]:
        return [self.bos_id, *ids] if wanted and self.bos_id is not None else ids


def check_text(text: object, argument: str) -> None:
    """Refuse what is not a string that UTF-8 can hold, naming the argument."""
    if not isinstance(text, str):
        raise ValueError(f"{argument} is {type(text).__name__}, must be a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise ValueError(
            f"{argument} has the lone surrogate U+{code:04X} at index {error.start}, must be valid Unicode"
        ) from None


def check_pair(target: Tokenizer, draft: Tokenizer) -> None:
    """Refuse a draft whose token strings differ from the target's; sizes may differ, as padding does."""
    for i, (ours, theirs) in enumerate(zip(target.strings, draft.strings, strict=False)):
        if ours != theirs:
            raise ValueError(f"draft tokenizer has {theirs!r} as token {i} where the target's has {ours!r}")
