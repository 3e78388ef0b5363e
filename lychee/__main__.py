"""The `lychee` command: its first argument names what to do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from . import __version__, interrupts

COMMANDS = {
    "run": "run",
    "check": "check",
    "tune": "tune",
    "inspect": "inspect_cli",
    "get": "get",
    "quantize": "quantize_cli",
    "serve": "serve",
}  # and their modules


def main(argv: Sequence[str] | None = None) -> int:
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        about = "".join(f"  {command}   {_module(command).__doc__}\n" for command in COMMANDS)
        print(f"usage: lychee {{{','.join(COMMANDS)}}} ...\n\n{about}\nOptions: lychee run --help")
        return 0
    if name == "--version":
        print(f"lychee {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"lychee: {name!r} is not a command, must be {' or '.join(COMMANDS)}", file=sys.stderr)
        return 2
    code: int = _module(name).main(rest)
    return code


def _module(command: str) -> ModuleType:
    with interrupts.while_importing(f"lychee {command}"):
        return import_module(f"lychee.{COMMANDS[command]}")


if __name__ == "__main__":
    sys.exit(main())
