"""JSON files of a model directory, which are untrusted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from lychee.nouns import counted

MAX_JSON_BYTES = 256 << 20  # a tokenizer.json of 128k tokens has 9 MB


class ModelError(ValueError):
    """A model directory cannot be used; the message names the file, what it holds and what is allowed."""


def parse_json(text: str | bytes, what: str) -> dict[str, Any]:
    """A JSON object, or ModelError naming `what`. A key given twice is refused, as readers differ on them."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            raise ModelError(f"{what} gives {max(counts, key=lambda key: counts[key])[:200]!r} twice")
        return made

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{what} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{what} holds a {type(value).__name__}, must be a JSON object")
    return value


def read_text(path: Path, limit: int = MAX_JSON_BYTES) -> str:
    """The file as UTF-8, or ModelError if it is absent, larger than `limit` bytes or not text."""
    if not path.is_file():
        raise ModelError(f"{path} does not exist")
    if (size := path.stat().st_size) > limit:
        raise ModelError(f"{path} has {counted(size, 'byte')}, may have at most {limit}")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    return parse_json(read_text(path), str(path))
