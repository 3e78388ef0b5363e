"""The packaged model pair: a small target, a tenth-size draft, and prompts of each kind of its text."""

from __future__ import annotations

import json
from pathlib import Path

_HERE = Path(__file__).parent
TARGET = _HERE / "target"
DRAFT = _HERE / "draft"

# A tiny model loops under greedy decoding, so the demonstration samples, with a seed.
PROMPT = 'def read_line(fp):\n    """Read one line from the file and return it without the newline."""\n'
TEMPERATURE, TOP_P, SEED = 0.8, 0.9, 8


def prompts() -> dict[str, list[str]]:
    """Ten prompts of each kind: `en`, `zh`, `code`."""
    kinds: dict[str, list[str]] = json.loads((_HERE / "prompts.json").read_text(encoding="utf-8"))
    return kinds
