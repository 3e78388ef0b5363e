"""An interrupt (Ctrl-C) ends a command with one line and exit code 130, whatever the command is doing."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

EXIT_CODE = 130


def say(command: str) -> int:
    """The line, on standard error, and the exit code."""
    print(f"{command}: interrupted", file=sys.stderr, flush=True)
    return EXIT_CODE


@contextmanager
def while_importing(command: str) -> Iterator[None]:
    """An interrupt in the block ends the process at once: imports take seconds, and some swallow exceptions."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, as in the background
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(say(command)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def say_where_uncaught(command: str) -> None:
    """From now on, for a program that catches none, and whose imports follow."""
    others = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.exit(say(command))
        others(kind, error, at)

    sys.excepthook = hook
