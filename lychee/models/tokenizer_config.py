"""TokenizerConfig: what tokenizer_config.json and its older companions say of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import ModelError, read_json


@dataclass(frozen=True)
class AddedToken:
    content: str
    special: bool


@dataclass(frozen=True)
class TokenizerConfig:
    """`add_bos` None leaves it to the tokenizer. `legacy`: a dummy prefix follows every control token (Llama 2)."""

    bos_token: str | None = None
    eos_token: str | None = None
    add_bos: bool | None = None
    legacy: bool = True
    added: Mapping[int, AddedToken] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> TokenizerConfig:
        """From whichever of the files exist. Raises ModelError."""
        values: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the latter wins
            if (path / name).is_file():
                values |= {key: value for key, value in read_json(path / name).items() if value is not None}
        where = str(path / "tokenizer_config.json")
        return cls(
            bos_token=_token(where, values, "bos_token"),
            eos_token=_token(where, values, "eos_token"),
            add_bos=_flag(where, values, "add_bos_token"),
            legacy=_flag(where, values, "legacy") is not False,
            added=_added_json(path / "added_tokens.json") | _added_decoder(where, values),
        )


def _token(where: str, values: Mapping[str, Any], key: str) -> str | None:
    """A string, or an object whose `content` is one."""
    value = values.get(key)
    content = value.get("content") if isinstance(value, dict) else value
    if (content is not None and not isinstance(content, str)) or content == "":
        raise ModelError(f"{where}: {key} is {str(value)[:80]!r}, must be a token's string or null")
    return content


def _flag(where: str, values: Mapping[str, Any], key: str) -> bool | None:
    value = values.get(key)
    if not (value is None or isinstance(value, bool)):
        raise ModelError(f"{where}: {key} is {str(value)[:80]!r}, must be true or false")
    return value


def _added_json(file: Path) -> dict[int, AddedToken]:
    """The older form, {string: id}."""
    tokens = read_json(file) if file.is_file() else {}
    if not all(content and type(i) is int for content, i in tokens.items()):
        raise ModelError(f"{file} must map each token's string to its id")
    return {i: AddedToken(content, True) for content, i in tokens.items()}


def _added_decoder(where: str, values: Mapping[str, Any]) -> dict[int, AddedToken]:
    """The newer form, {id: {content, special}}."""
    given = values.get("added_tokens_decoder", {})
    added = {}
    for key, token in given.items() if isinstance(given, dict) else [("", given)]:
        content = token.get("content") if isinstance(token, dict) else None
        if not key.isdecimal() or not isinstance(content, str) or not content:
            raise ModelError(f"{where}: added_tokens_decoder must map each id to an object with the token's content")
        added[int(key)] = AddedToken(content, token.get("special") is True)
    return added
