"""Drafts that come with lychee, for models that `lychee get` fetches by name."""

from __future__ import annotations

from pathlib import Path


def draft_for(name: str) -> Path | None:
    """The draft's directory, None for a model that has none."""
    path = Path(__file__).parent / name
    return path if (path / "config.json").is_file() else None
