"""Tokens per second of controllers on one pair: `auto` beside fixed shapes, the window, and native decoding.

    python -m bench.policies [--model PATH --draft-model PATH] [--temperature 0] [--runs 15] [POLICY ...]

A policy is `native`, `auto`, `window` (the chain of adaptive length), a number (a chain of that length) or a tree's
children by depth, such as 2,1,1. In each run every prompt is completed by every policy, in random order, so that a
machine that is slow for a while is slow for all of them. A prompt's time is its median over runs; given are tokens per
second of all prompts, and `auto`'s as a multiple of each policy's, with a bootstrap interval of 95 % over runs. A first
run, in which `auto` learns and programs are lowered, does not count.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from bench.pair import add_pair, asked, load, read_prompts
from bench.parser import Parser
from lychee import ModelError, ParameterError, SamplingParams
from lychee.runtime.alternate import AUTO, NATIVE, Sample, alternate, speeds, totals
from lychee.runtime.config import SpeculativeConfig

DRAWS = 2000  # of runs, for an interval
POLICIES = [AUTO, "window", NATIVE, "2", "4", "6", "8", "2,1,1"]


def seconds(samples: Sequence[Sample]) -> NDArray[np.float64]:
    """[runs, prompts]: of one policy's samples."""
    runs, groups = max(s.run for s in samples) + 1, max(s.group for s in samples) + 1
    found = np.zeros((runs, groups))
    for sample in samples:
        found[sample.run, sample.group] = sample.seconds
    return found


def faster(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> tuple[float, float, float]:
    """Their time as a multiple of ours, [runs, prompts], by each prompt's median, and the ends of its interval."""

    def ratio(runs: Any) -> float:
        return float(np.median(theirs[runs], 0).sum() / np.median(ours[runs], 0).sum())

    draws = np.random.default_rng(0).integers(0, len(ours), (DRAWS, len(ours)))
    return ratio(slice(None)), *map(float, np.quantile([ratio(runs) for runs in draws], [0.025, 0.975]))


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("policies", nargs="*", metavar="POLICY", help=f"default: {' '.join(POLICIES)}")
    add_pair(parser)
    parser.add_argument("--prompts", type=int, metavar="N", help="only the first N prompts")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.runs < 1:
        parser.error(f"--runs is {args.runs}, must be at least 1")
    policies = list(dict.fromkeys([AUTO, *(args.policies or POLICIES)]))
    try:
        prompts = read_prompts(args)[: args.prompts]
        llm = load(args, SpeculativeConfig(tree="auto"), prefix_cache=False)
        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, ignore_eos=True)
        for native in [False, True] if NATIVE in policies else [False]:
            llm.warm_up(params, native=native)
        samples = alternate(llm, [[prompt] for prompt in asked(llm, prompts, args)], params, policies, args.runs)
    except (ModelError, ParameterError, OSError, UnicodeDecodeError) as error:
        parser.error(str(error))
    shown, results = Table("policy", "tokens/s", "emitted per round", "auto / it", box=None), []
    found = {policy: [sample for sample in samples if sample.policy == policy] for policy in policies}
    ours = seconds(found[AUTO])
    for policy, own in found.items():
        rates, emitted = speeds(own), totals(own)["mean_emitted_per_round"]
        typical = sum(sample.tokens for sample in own) / len(rates) / float(np.median(seconds(own), 0).sum())
        median, low, high = faster(ours, seconds(own))
        results.append({"policy": policy, "tokens_per_second": rates, "emitted": emitted, "auto": [median, low, high]})
        shown.add_row(policy, f"{typical:.1f}", f"{emitted:.2f}", f"{median:.3f}  [{low:.3f}, {high:.3f}]")
    Console(width=None if sys.stdout.isatty() else 120).print(shown)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
