"""Greedy decoding of a model pair three ways in turn: natively by the torch references, natively, and speculatively.

    python -m bench.cpu_pair [--model DIR --draft-model DIR] [--prompts 6] [--max-tokens 64] [--repeats 9] [--json FILE]

Prompts are the packaged ones, one at a time. Times are medians over the repeats, of all prompts together; another way
goes first in every repeat.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.parser import Parser
from lychee import LLM, ModelError, ParameterError, SamplingParams, demo
from lychee.kernels import OPS


@contextmanager
def by_reference() -> Iterator[None]:
    """Within, a call of an op is a call of its torch reference, without any check."""
    launching = {type(op): type(op).__dict__["__call__"] for op in OPS.values()}
    for op in OPS.values():
        type(op).__call__ = staticmethod(op.reference)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for kind, call in launching.items():
            kind.__call__ = call  # type: ignore[method-assign]


def ways(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> dict[str, Callable[[], list[tuple[int, ...]]]]:
    """Each gives the tokens of all prompts."""

    def decode(native: bool) -> list[tuple[int, ...]]:
        outputs = chain.from_iterable(llm.generate(prompt, params, native=native) for prompt in prompts)
        return [tuple(completion.token_ids) for output in outputs for completion in output.outputs]

    def reference() -> list[tuple[int, ...]]:
        target = llm.engine(native=True).target
        target.binds = False
        try:
            with by_reference():
                return decode(native=True)
        finally:
            target.binds = True

    return {"reference": reference, "native": lambda: decode(True), "speculative": lambda: decode(False)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--model", type=Path, default=demo.TARGET)
    parser.add_argument("--draft-model", type=Path, default=demo.DRAFT)
    parser.add_argument("--prompts", type=int, default=6, help="how many, of every kind in turn (default 6)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if args.prompts < 1 or args.repeats < 1:
        parser.error(f"--prompts is {args.prompts} and --repeats is {args.repeats}, must be at least 1")
    prompts = list(chain.from_iterable(zip(*demo.prompts().values(), strict=True)))[: args.prompts]
    try:
        llm = LLM(args.model, draft_model=args.draft_model, device="cpu", prefix_cache=False)
        params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    except (ModelError, ParameterError) as error:
        parser.error(str(error))
    runs = ways(llm, prompts, params)
    tokens = {name: run() for name, run in runs.items()}  # a warm-up too
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for _ in range(args.repeats):
        for name in order:
            started = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - started)
        order.append(order.pop(0))
    record = {
        "seconds": {name: median(taken) for name, taken in seconds.items()},
        "tokens": {name: sum(map(len, found)) for name, found in tokens.items()},
        "identical": tokens["native"] == tokens["speculative"],
    }
    show(Console(width=None if sys.stdout.isatty() else 120), record)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


def show(console: Console, record: dict[str, Any]) -> None:
    seconds, tokens = record["seconds"], record["tokens"]
    table = Table(box=None)
    for heading in ("", "tokens/s", "times as fast as the one above"):
        table.add_column(heading, justify="right")
    above = None
    for name, taken in seconds.items():
        table.add_row(name, f"{tokens[name] / taken:.1f}", f"{above / taken:.2f}" if above else "")
        above = taken
    console.print(table)
    console.print(f"native and speculative tokens identical: {str(record['identical']).lower()}")


if __name__ == "__main__":
    main()
