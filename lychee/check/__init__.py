"""`lychee check`: prove on a pair of models that speculation is lossless, and that the proofs would see it if not."""

from __future__ import annotations

from collections.abc import Sequence

from .. import interrupts


def main(argv: Sequence[str] | None = None) -> int:
    with interrupts.while_importing("lychee check"):
        from .cli import main as check
    return check(argv)
