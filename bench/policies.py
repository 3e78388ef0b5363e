"""Tokens per second of controllers on one pair: `auto` beside fixed shapes, the window, and native decoding.

    python -m bench.policies [--model PATH --draft-model PATH] [--temperature 0] [--runs 15] [POLICY ...]

A policy is `native`, `auto`, `window` (the chain of adaptive length), a number (a chain of that length) or a tree's
children by depth, such as 2,1,1. In each run every prompt is completed by every policy, in random order, so that a
machine that is slow for a while is slow for all of them. Given are medians over runs, and for each policy the median of
`auto`'s speed as a multiple of its own in the same run, with a bootstrap interval of 95 %. A first run, in which `auto`
learns and programs are lowered, does not count.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.pair import add_pair, asked, load, ratio, read_prompts
from lychee import LLM, ModelError, ParameterError, SamplingParams
from lychee.runtime.config import SpeculativeConfig
from lychee.runtime.controller import Controller, Fixed, Window
from lychee.runtime.tree import TreeShape, parse_tree

POLICIES = ["auto", "window", "native", "2", "4", "6", "8", "2,1,1"]
MAX_LENGTH, THRESHOLD = 16, 0.4  # of the window


@dataclass
class Runs:
    """Of one policy: tokens per second of each run, and rounds and what they emitted over all."""

    speeds: list[float] = field(default_factory=list)
    rounds: int = 0
    emitted: int = 0


def controller_of(policy: str, auto: Controller) -> Controller | None:
    """None decodes natively. Raises ParameterError."""
    if policy == "native":
        return None
    if policy in ("auto", "window"):
        return auto if policy == "auto" else Window(MAX_LENGTH, THRESHOLD)
    if policy.isdecimal() and int(policy) <= MAX_LENGTH:
        return Fixed(TreeShape.chain(int(policy)))
    shape = parse_tree(policy, 64, MAX_LENGTH)
    if not isinstance(shape, TreeShape):
        raise ParameterError(f"policy is {policy!r}, must be native, auto, window, a length or a tree's children")
    return Fixed(shape)


def measure(
    llm: LLM, prompts: Sequence[Any], params: SamplingParams, policies: Sequence[str], runs: int
) -> dict[str, Runs]:
    engine = llm.engine()
    auto = engine.controller
    controllers = {policy: controller_of(policy, auto) for policy in policies}
    found = {policy: Runs() for policy in policies}
    order, draws = list(policies), random.Random(0)
    for run in track(range(runs + 1), "measuring", transient=True, disable=not sys.stderr.isatty()):
        seconds, tokens = dict.fromkeys(policies, 0.0), dict.fromkeys(policies, 0)
        for prompt in prompts:
            draws.shuffle(order)
            for policy in order:
                controller = controllers[policy]
                engine.controller = controller or auto
                begin = time.perf_counter()
                (output,) = llm.generate([prompt], params, native=controller is None)
                seconds[policy] += time.perf_counter() - begin
                (completion,) = output.outputs
                tokens[policy] += len(completion.token_ids)
                if run:
                    found[policy].rounds += completion.stats.rounds
                    found[policy].emitted += completion.stats.emitted_in_rounds
        if run:
            for policy in policies:
                found[policy].speeds.append(tokens[policy] / seconds[policy])
    engine.controller = auto
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    policies = list(dict.fromkeys(["auto", *(args.policies or POLICIES)]))
    try:
        prompts = read_prompts(args)[: args.prompts]
        llm = load(args, SpeculativeConfig(tree="auto"), prefix_cache=False)
        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, ignore_eos=True)
        for native in [False, True] if "native" in policies else [False]:
            llm.warm_up(params, native=native)
        found = measure(llm, asked(llm, prompts, args), params, policies, args.runs)
    except (ModelError, ParameterError, OSError, UnicodeDecodeError) as error:
        parser.error(str(error))
    shown, results = Table("policy", "tokens/s", "emitted per round", "auto / it", box=None), []
    for policy, runs in found.items():
        median, low, high = ratio(found["auto"].speeds, runs.speeds)
        emitted = runs.emitted / max(1, runs.rounds)
        speed = float(np.median(runs.speeds))
        results.append(
            {"policy": policy, "tokens_per_second": runs.speeds, "emitted": emitted, "auto": [median, low, high]}
        )
        shown.add_row(policy, f"{speed:.1f}", f"{emitted:.2f}", f"{median:.3f}  [{low:.3f}, {high:.3f}]")
    Console(width=None if sys.stdout.isatty() else 120).print(shown)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
