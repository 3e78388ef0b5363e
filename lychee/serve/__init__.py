"""`lychee serve`: an engine that many share over HTTP, as OpenAI's API has it. Only the command imports its extra."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lychee import interrupts

EXTRA = ("starlette", "uvicorn", "prometheus_client", "limits", "pydantic")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        with interrupts.while_importing("lychee serve"):
            from .cli import main as serve
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in EXTRA:
            raise
        print(f"lychee serve: {error.name} is not installed; pip install 'lychee-decode[serve]'", file=sys.stderr)
        return 2
    return serve(argv)
