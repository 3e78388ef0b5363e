"""Where the prompts of `lychee run` come from."""

from __future__ import annotations

import argparse
import select
import sys

from . import demo
from .options import given_prompts
from .runtime.checks import ParameterError

STDIN_WAIT_S = 2.0


def prompt_texts(args: argparse.Namespace, packaged: bool) -> list[str]:
    """Of --prompt, --prompt-file or standard input; without any, the packaged pair's own."""
    if given := given_prompts(args, args.prompt_file_whole):
        return given
    if text := _read_stdin(wait=not packaged):
        return [text]
    if not packaged:
        raise ParameterError("no prompt: give --prompt, --prompt-file, or text on standard input")
    return [p for kind in demo.prompts().values() for p in kind] if args.compare else [demo.PROMPT]


def _read_stdin(wait: bool) -> str:
    """Standard input less its last newline, unless it is a terminal. Without `wait`, a silent one counts as empty."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    if not wait and not select.select([sys.stdin], [], [], STDIN_WAIT_S)[0]:
        print("lychee run: nothing on standard input, so the packaged prompt is used", file=sys.stderr)
        return ""
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ParameterError(f"standard input is not UTF-8: {error}") from error
    return text.replace("\r\n", "\n").removesuffix("\n")
