"""The `lychee` command: its first argument names what to do."""

from __future__ import annotations

import sys

from . import __version__, run

COMMANDS = {"run": run.main}


def main() -> int:
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(f"usage: lychee {{{','.join(COMMANDS)}}} ...\n\n  run   {run.__doc__}\n\nOptions: lychee run --help")
        return 0
    if name == "--version":
        print(f"lychee {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"lychee: {name!r} is not a command, must be {' or '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return COMMANDS[name](rest)


if __name__ == "__main__":
    sys.exit(main())
