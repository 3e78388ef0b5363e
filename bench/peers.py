"""lychee against transformers and llama.cpp: the same GGUF file, prompts, output length and threads, in one run.

    python -m bench.peers --model FILE.gguf [--draft-model MODEL] [--sides NAME,...] [--json FILE] [--figure FILE.png]

Every side is a process that loads once and is stopped while others run. Decoding is greedy and goes past the end of the
text. Rates are medians over prompts and rounds, of whole calls: prefill included. A side whose package cannot be
imported is left out; `pip install lychee-decode[peers]` installs them all.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from bench.parser import Parser
from bench.peer_sides import Setup, Side, all_sides, compare, measure, show
from bench.peer_sides.client import Client, MissingError, SideError
from bench.peer_sides.inputs import encoded, processor
from bench.rows import counts
from lychee.models.chat import ChatError
from lychee.models.files import ModelError
from lychee.models.model_files import gguf_path
from lychee.models.names import resolve_model
from lychee.nouns import counted

PROMPTS = Path(__file__).with_name("peer_prompts.json")
REPEATS = 5


def parser() -> argparse.ArgumentParser:
    p = Parser(__doc__)
    p.add_argument("--model", required=True, help="a GGUF file, or a name as for `lychee run`")
    p.add_argument("--draft-model", metavar="MODEL", help="without it there are no speculative lychee sides")
    p.add_argument("--draft-quant", metavar="FORMAT")
    p.add_argument("--prompts", type=Path, metavar="FILE", default=PROMPTS, help="a JSON list of {kind, text}")
    p.add_argument("--max-tokens", type=int, default=64)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--lookup-tokens", type=int, metavar="K", help="default: what each package advises")
    p.add_argument("--sides", help=f"names between commas; default all: {', '.join(all_sides())}")
    p.add_argument("--rows", type=counts, default=[1, 2, 3, 4, 5, 8, 9, 12, 16], help="rows of the passes to time")
    p.add_argument("--context", type=int, default=128, help="cached tokens of these passes (default 128)")
    p.add_argument("--json", type=Path, metavar="FILE")
    p.add_argument("--figure", type=Path, metavar="FILE.png")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    p = parser()
    args = p.parse_args(argv)
    for name in ("max_tokens", "rounds", "threads"):
        if getattr(args, name) < 1:
            p.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, must be at least 1")
    if args.figure and importlib.util.find_spec("matplotlib") is None:
        p.error("--figure needs matplotlib, which is not installed")
    try:
        run(args, chosen(args))
    except (ModelError, ChatError, SideError, ValueError, OSError) as error:
        p.error(str(error))


def chosen(args: argparse.Namespace) -> dict[str, Side]:
    """The sides that were asked for."""
    sides = all_sides()
    names = args.sides.split(",") if args.sides else list(sides)
    for name in names:
        if name not in sides:
            raise ValueError(f"--sides has {name!r}, must be of {', '.join(sides)}")
        if args.sides and sides[name].drafts and not args.draft_model:
            raise ValueError(f"--sides has {name}, which needs a --draft-model")
    return {name: sides[name] for name in names}


def run(args: argparse.Namespace, sides: dict[str, Side]) -> dict[str, Any]:
    """Raises what the readers of models raise, SideError and ValueError."""
    model = gguf_path(resolve_model(args.model))
    if model is None:
        raise ModelError(f"--model is {args.model}, must be a GGUF file that is on this machine")
    draft = str(resolve_model(args.draft_model).resolve()) if args.draft_model else None
    prompts = encoded(model, args.prompts)
    longest = max(max(map(len, prompts)) + args.max_tokens, args.context + max(args.rows))
    notes = [] if draft else ["Without a --draft-model there are no speculative lychee sides."]
    clients: dict[str, Client] = {}
    with ExitStack() as stack:
        for name, side in track(sides.items(), "loading", console=Console(stderr=True), transient=True):
            if side.drafts and draft is None:
                continue
            context = -(-(longest + 32) // 64) * 64
            setup = Setup(
                str(model.resolve()), draft, args.draft_quant, args.threads, context, args.lookup_tokens, side.options
            )
            try:
                clients[name] = stack.enter_context(Client(side, setup))
            except MissingError as error:
                notes.append(f"{name} is missing: {error}")
        if not clients:
            raise ValueError(" ".join(["no side is left to compare.", *notes]))
        measure.warm_up(clients, prompts, args.max_tokens)
        asked = measure.samples(clients, prompts, args.max_tokens, args.rounds)
        total = len(clients) * len(prompts) * args.rounds
        samples = list(track(asked, "timing", total, console=Console(stderr=True), transient=True))
        ms = measure.pass_ms(clients, args.rows, args.context, REPEATS)
        found = compare.summaries(sides, clients, samples, prompts)
        about = {name: client.about for name, client in clients.items()}
    title = f"{model.name}, {counted(args.max_tokens, 'token')}, {counted(args.threads, 'thread')}, {processor()}"
    console = Console(width=None if sys.stdout.isatty() else 130)
    show.print_all(
        console, title, found, ms, args.context, [*notes, *(f"{name}: {text}" for name, text in about.items())]
    )
    record = {
        "title": title,
        "notes": notes,
        "about": about,
        "sides": {name: asdict(summary) for name, summary in found.items()},
        "pass_ms": ms,
        "samples": [asdict(sample) for sample in samples],
    }
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.figure:
        show.figure(args.figure, title, found, ms)
    return record


if __name__ == "__main__":
    main()
