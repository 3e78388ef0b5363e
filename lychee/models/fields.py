"""Fields: a JSON object of a model's files with checked access. What it refuses, it refuses in one sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .files import ModelError

MAX_POSITIONS = 1 << 21
# Largest believable value of each size: a config is untrusted, and tables are allocated from it.
LIMITS = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 19,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 10,
    "num_key_value_heads": 1 << 10,
    "head_dim": 1 << 10,
    "max_position_embeddings": MAX_POSITIONS,
    "original_max_position_embeddings": MAX_POSITIONS,
    "sliding_window": MAX_POSITIONS,
    "max_window_layers": 1 << 10,
}


@dataclass(frozen=True)
class Fields:
    """Values by key; null counts as absent. `where` names the object in errors. Every getter raises ModelError."""

    where: str
    values: Mapping[str, Any]

    def refuse(self, key: str, allowed: str, value: Any = None) -> ModelError:
        text = shown(self.values.get(key) if value is None else value)
        return ModelError(f"{self.where}: {key} is {text[:200]}, must be {allowed}")

    def missing(self, key: str) -> ModelError:
        return ModelError(f"{self.where}: {key} is missing")

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        """An integer from `least` to its limit."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.missing(key)
            return default
        if type(value) is not int or not least <= value <= LIMITS[key]:
            raise self.refuse(key, f"an integer from {least} to {LIMITS[key]}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.missing(key)
            return default
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.refuse(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        if value not in (None, False, True) or type(value) in (int, float):
            raise self.refuse(key, "true or false")
        return default if value is None else bool(value)

    def token_ids(self, key: str, vocab_size: int) -> list[int]:
        """One id, a list of them, or null."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(i) is not int or not 0 <= i < vocab_size for i in ids):
            raise self.refuse(key, f"a token id below vocab_size ({vocab_size}), a list of them, or null")
        return ids


def shown(value: Any) -> str:
    """The value as the file spells it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return repr(value) if isinstance(value, str) and value.isdecimal() else str(value)
