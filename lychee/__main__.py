"""The `lychee` command: its first argument names what to do."""

from __future__ import annotations

import sys

from . import __version__, check, get, quantize_cli, run, serve

COMMANDS = {
    "run": (run.main, run.__doc__),
    "check": (check.main, check.__doc__),
    "get": (get.main, get.__doc__),
    "quantize": (quantize_cli.main, quantize_cli.__doc__),
    "serve": (serve.main, serve.__doc__),
}


def main() -> int:
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        about = "".join(f"  {command}   {doc}\n" for command, (_, doc) in COMMANDS.items())
        print(f"usage: lychee {{{','.join(COMMANDS)}}} ...\n\n{about}\nOptions: lychee run --help")
        return 0
    if name == "--version":
        print(f"lychee {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"lychee: {name!r} is not a command, must be {' or '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return COMMANDS[name][0](rest)


if __name__ == "__main__":
    sys.exit(main())
