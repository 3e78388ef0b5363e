"""Tokens per second of native and speculative decoding at several numbers of requests at once, on one pair.

    python -m bench.throughput [--model PATH --draft-model PATH] [--requests 8 32] [--temperature 0] [--runs 9]

In each run both decode the same requests as one batch, in random order, so that a machine that is slow for a while is
slow for both. Given are medians over runs, and the median of speculative over native speed in the same run with a
bootstrap interval of 95 %. A first run, in which programs are lowered, does not count.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.pair import add_pair, asked, load, ratio, read_prompts
from lychee import LLM, ModelError, ParameterError, SamplingParams
from lychee.runtime.config import SpeculativeConfig

NAMES = ("native", "speculative")


def measure(llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams], runs: int) -> dict[str, Any]:
    """Of these requests as one batch: tokens per second of each run by name, and what rounds emitted for a request."""
    speeds: dict[str, list[float]] = {name: [] for name in NAMES}
    order, draws, emitted, rounds = list(NAMES), random.Random(0), 0, 0
    for run in range(runs + 1):
        draws.shuffle(order)
        for name in order:
            begin = time.perf_counter()
            outputs = llm.generate(list(prompts), list(params), native=name == "native")
            seconds = time.perf_counter() - begin
            stats = [output.outputs[0].stats for output in outputs]
            if run:
                speeds[name].append(sum(one.emitted for one in stats) / seconds)
            if run and name == "speculative":
                emitted += sum(one.emitted_in_rounds for one in stats)
                rounds += sum(one.rounds for one in stats)
    return {**speeds, "emitted": emitted / max(1, rounds)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
            found.append({"requests": count, **measure(llm, some, [params] * count, args.runs)})
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
