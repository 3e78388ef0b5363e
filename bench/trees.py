"""Mean emitted per round of chains and trees, by acceptance rule and temperature, with standard errors.

    python -m bench.trees [--model PATH --draft-model PATH] [--prompt-file FILE] [--trees 1,1,1,1 2,2,1,1] [--seeds 2]

A tree is given by its children per node at each depth: 1,1,1,1 is a chain of 4. Rules are those of SpeculativeConfig's
`verify`; at temperature 0 all are greedy. A sample is one prompt with one seed; the standard error is of the ratio of
tokens emitted to rounds over samples. `off trunk` is the share of accepted nodes that are not on the first-drawn path.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.pair import add_pair, asked, load, read_prompts
from bench.parser import Parser
from lychee import LLM, ModelError, ParameterError, SamplingParams
from lychee.runtime.config import SpeculativeConfig

RULES = ("rejection", "traversal", "coupled")


@dataclass(frozen=True)
class Sample:
    """One completion: rounds, tokens that they emitted, nodes accepted, and those of them that are not the trunk's."""

    rounds: int
    emitted: int
    accepted: int
    off_trunk: int


def mean_emitted(samples: Sequence[Sample]) -> tuple[float, float]:
    """Tokens per round and its standard error: that of a ratio of sums, by the spread of samples about it."""
    rounds, count = sum(s.rounds for s in samples), len(samples)
    mean = sum(s.emitted for s in samples) / rounds
    spread = sum((s.emitted - mean * s.rounds) ** 2 for s in samples)
    return mean, math.sqrt(count / (count - 1) * spread) / rounds if count > 1 else math.nan


def measure(llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> list[Sample]:
    """Of each prompt with each of `params`, as one batch per params."""
    found = []
    for one in params:
        stats = [c.stats for output in llm.generate(list(prompts), one) for c in output.outputs]
        found += [
            Sample(s.rounds, s.emitted_in_rounds, s.accepted, s.accepted - s.trunk_accepted) for s in stats if s.rounds
        ]
    return found


def cells(args: argparse.Namespace) -> list[tuple[str, str, float]]:
    """Tree, rule and temperature of each measurement."""
    every = [(tree, rule, t) for t in args.temperature for tree in args.trees for rule in (RULES if t else ("greedy",))]
    return [(tree, rule, t) for tree, rule, t in every if t or rule == "greedy"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    add_pair(parser)
    parser.add_argument("--trees", nargs="+", default=["1,1,1,1", "2,1,1,1", "2,2,1,1", "4,2,1,1"])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.5, 0.7, 1.0])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=2, help="samples of each prompt at temperatures above 0")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.seeds < 1:
        parser.error(f"--seeds is {args.seeds}, must be at least 1")
    results, shown = [], Table("temperature", "tree", "rule", "emitted per round", "off trunk", box=None)
    try:
        prompts = read_prompts(args)
        llms = {}
        for tree, rule, temperature in track(cells(args), "measuring", transient=True, disable=not sys.stderr.isatty()):
            if (tree, rule) not in llms:
                config = SpeculativeConfig(tree=tree, verify="auto" if rule == "greedy" else rule)
                llms = {(tree, rule): load(args, config)}
            llm = llms[tree, rule]
            seeds = range(args.seeds) if temperature else [None]
            params = [
                SamplingParams(temperature=temperature, seed=seed, max_tokens=args.max_tokens, ignore_eos=True)
                for seed in seeds
            ]
            samples = measure(llm, asked(llm, prompts, args), params)
            mean, error = mean_emitted(samples)
            off = sum(s.off_trunk for s in samples) / max(1, sum(s.accepted for s in samples))
            results.append({"temperature": temperature, "tree": tree, "rule": rule, "emitted": mean, "error": error})
            shown.add_row(f"{temperature:g}", tree, rule, f"{mean:.3f} ± {error:.3f}", f"{off:.1%}")
    except (ModelError, ParameterError, OSError, UnicodeDecodeError) as error:
        parser.error(str(error))
    Console(width=None if sys.stdout.isatty() else 120).print(shown)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
