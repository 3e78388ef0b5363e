"""Tokens per second of native and speculative decoding at several numbers of requests at once, on one pair.

    python -m bench.throughput [--model PATH --draft-model PATH] [--requests 8 32] [--temperature 0] [--runs 9]

In each run both decode the same requests as one batch, in random order, so that a machine that is slow for a while is
slow for both. Given are medians over runs, and the median of speculative over native speed in the same run with a
bootstrap interval of 95 %. A first run, in which programs are lowered, does not count.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.pair import add_pair, asked, load, read_prompts
from bench.parser import Parser
from lychee import LLM, ModelError, ParameterError, SamplingParams
from lychee.runtime.alternate import AUTO, NATIVE, alternate, ratio, speeds, totals
from lychee.runtime.config import SpeculativeConfig

NAMES = ("native", "speculative")


def measure(llm: LLM, prompts: Sequence[Any], params: SamplingParams, runs: int) -> dict[str, Any]:
    """Of these requests as one batch: tokens per second of each run by name, and what rounds emitted for a request."""
    samples = alternate(llm, [prompts], params, (NATIVE, AUTO), runs)
    native, speculative = ([s for s in samples if s.policy == policy] for policy in (NATIVE, AUTO))
    emitted = totals(speculative)["mean_emitted_per_round"]
    return dict(zip(NAMES, (speeds(native), speeds(speculative)), strict=True)) | {"emitted": emitted}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    add_pair(parser)
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 32], metavar="N", help="at once (default 8 32)")
    parser.add_argument("--tree", default="auto", help="what is drafted (default auto)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    for name, least in (("runs", args.runs), ("requests", min(args.requests))):
        if least < 1:
            parser.error(f"--{name} is {least}, must be at least 1")
    found = []
    try:
        prompts = read_prompts(args)
        llm = load(args, SpeculativeConfig(tree=args.tree), prefix_cache=False, max_num_seqs=max(args.requests))
        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, ignore_eos=True)
        for native in (False, True):
            llm.warm_up(params, native=native)
        for count in args.requests:
            some = list(islice(cycle(asked(llm, prompts, args)), count))
            found.append({"requests": count, **measure(llm, some, params, args.runs)})
    except (ModelError, ParameterError, OSError, UnicodeDecodeError) as error:
        parser.error(str(error))
    shown = Table("requests", *(f"{name} tokens/s" for name in NAMES), "emitted per round", "ratio", box=None)
    for row in found:
        row["ratio"] = median, low, high = ratio(row["speculative"], row["native"])
        speeds = [f"{np.median(row[name]):.1f}" for name in NAMES]
        shown.add_row(str(row["requests"]), *speeds, f"{row['emitted']:.2f}", f"{median:.3f}  [{low:.3f}, {high:.3f}]")
    Console(width=None if sys.stdout.isatty() else 120).print(shown)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
