"""The options of a bench."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Of the program `python -m bench.NAME`, whose docstring is its help."""

    def __init__(self, doc: str | None) -> None:
        spec = sys.modules["__main__"].__spec__
        name = spec.name.removesuffix(".__main__") if spec else None
        super().__init__(prog=name, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        """A sentence alone, as of lychee's commands, and their exit code."""
        self.exit(2, f"{self.prog}: {message}\n")
