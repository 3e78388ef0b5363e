"""A study of speculation on one pair.

    python -m bench.studies NAME [--model PATH --draft-model PATH] [--runs 5] [--out DIR]

Prints a table and writes NAME.png and NAME.json to the directory. Speeds are of emitted tokens, policies are alternated
prompt by prompt, and intervals are bootstrap intervals of 95 % of the median over runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.pair import add_pair, load
from bench.parser import Parser
from lychee import ModelError, ParameterError
from lychee.runtime.config import SpeculativeConfig

from . import details, sweeps
from .study import Run

STUDIES: dict[str, Run] = {
    run.__name__: run
    for run in (
        sweeps.ladder,
        sweeps.mixture,
        sweeps.temperature,
        sweeps.context,
        sweeps.batch,
        details.draft_size,
        details.memory,
        details.latency,
        details.theory,
    )
}


def parser() -> argparse.ArgumentParser:
    lines = [f"  {name:<12} {(run.__doc__ or '').splitlines()[0]}" for name, run in STUDIES.items()]
    made = Parser((__doc__ or "") + "\n" + "\n".join(lines))
    made.add_argument("study", choices=STUDIES, metavar="NAME")
    add_pair(made)
    made.add_argument(
        "--draft-models", nargs="+", metavar="PATH", help="of draft_size (default: the draft, the target)"
    )
    made.add_argument("--prompts", type=int, metavar="N", help="only the first N prompts; of context: N places")
    made.add_argument("--temperature", type=float, default=0.0)
    made.add_argument("--max-tokens", type=int, default=64)
    made.add_argument("--runs", type=int, default=5)
    made.add_argument("--out", type=Path, default=Path("studies"), metavar="DIR")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    made = parser()
    args = made.parse_args(argv)
    for name in ("runs", "max_tokens", "prompts"):
        if (value := getattr(args, name)) is not None and value < 1:
            made.error(f"--{name.replace('_', '-')} is {value}, must be at least 1")
    if importlib.util.find_spec("matplotlib") is None:
        made.error("figures need matplotlib, which is not installed: pip install matplotlib")
    command = shlex.join(["python", "-m", "bench.studies", *(sys.argv[1:] if argv is None else argv)])
    try:
        args.out.mkdir(parents=True, exist_ok=True)  # a bad one is told before the work
        llm = load(args, SpeculativeConfig(tree="auto"), prefix_cache=False)
        llm.warm_up(sweeps.sampling(args))
        llm.warm_up(sweeps.sampling(args), native=True)
        study = STUDIES[args.study](llm, args)
        written = study.write(args.out, args.study, command)
    except (ModelError, ParameterError, OSError, UnicodeDecodeError) as error:
        made.error(str(error))
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(study.table())
    for note in study.notes:
        console.print(note)
    console.print("written: " + ", ".join(map(str, written)), highlight=False)


if __name__ == "__main__":
    main()
