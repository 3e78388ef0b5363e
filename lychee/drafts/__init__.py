"""Drafts that come with lychee, by name, for models that `lychee get` fetches."""

from __future__ import annotations

from pathlib import Path

DRAFTS = {"smollm2-draft": Path(__file__).parent / "smollm2"}
