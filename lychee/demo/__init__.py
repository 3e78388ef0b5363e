"""The packaged model pair: a small target, a tenth-size draft, and prompts of each kind of its text."""

from __future__ import annotations

import json
from pathlib import Path

_HERE = Path(__file__).parent
TARGET = _HERE / "target"
DRAFT = _HERE / "draft"

# A tiny model loops under greedy decoding, so the demonstration samples, with a seed.
PROMPT = "def test_"
TEMPERATURE, TOP_P, SEED = 0.7, 0.95, 0


def prompts() -> dict[str, list[str]]:
    """Ten prompts of each kind: `en`, `zh`, `code`."""
    kinds: dict[str, list[str]] = json.loads((_HERE / "prompts.json").read_text(encoding="utf-8"))
    return kinds
