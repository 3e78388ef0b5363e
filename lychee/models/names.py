"""Where a model is that is given by a path or by a name."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .files import ModelError
from .hub import fetched_snapshot
from .model_files import is_model
from .wheels import WHEELS, is_complete

HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/([\w.-]+\.gguf))?", re.ASCII)
DRAFTS = {"smollm2-draft": Path(__file__).parents[1] / "drafts" / "smollm2"}  # for models that `lychee get` fetches


def resolve_model(name: str | Path) -> Path:
    """Where a model is: a directory or GGUF file, else a draft that comes with lychee, or what `lychee get` fetched.

    Raises ModelError for a name that has not been fetched. What is no name is given back as a path.
    """
    path = Path(name)
    if is_model(path):
        return path
    if name in DRAFTS:
        return DRAFTS[str(name)]
    if name in WHEELS:
        directory = models_dir() / name
        if not is_complete(WHEELS[str(name)], directory):
            raise ModelError(f"{name} is not on this machine; fetch it with `lychee get {name}`")
        return directory
    match = HUB_ID.fullmatch(str(name))
    if match is None:
        return path
    found = fetched_snapshot(match[1], match[2])
    if found is None:
        raise ModelError(
            f"{name} is neither a model directory nor a model that was fetched; `lychee get {name}` looks on the hub"
        )
    return found


def models_dir() -> Path:
    """Where fetched models are kept: under LYCHEE_HOME, by default ~/.cache/lychee."""
    home = os.environ.get("LYCHEE_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "lychee") / "models"
