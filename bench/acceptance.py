"""Acceptance by kind of text at a fixed draft length, on the packaged pair's prompts or any pair and prompt file.

    python -m bench.acceptance [--model DIR --draft-model DIR --prompt-file FILE] [--length 4] [--temperature 0 0.7]

`repeated` is the share of 4-grams of the output that occurred before in it: a looping text flatters the draft, so an
acceptance rate next to a large share says little. `by depth` is the share accepted of the tokens drafted at each depth.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.parser import Parser
from lychee import LLM, ModelError, ParameterError, SamplingParams, demo
from lychee.nouns import counted


def repeated_share(token_ids: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that occurred earlier in the text."""
    grams = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def measure(llm: LLM, prompts: Sequence[Any], params: SamplingParams) -> dict[str, Any]:
    llm.reset_metrics()
    outputs = llm.generate(list(prompts), params)
    totals = llm.metrics().totals()
    repeats = [repeated_share(c.token_ids) for output in outputs for c in output.outputs]
    return {
        "acceptance_rate": totals["acceptance_rate"],
        "mean_emitted_per_round": totals["mean_emitted_per_round"],
        "acceptance_by_depth": totals["acceptance_by_depth"],
        "repeated_4_grams": sum(repeats) / len(repeats),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--model", type=Path, default=demo.TARGET)
    parser.add_argument("--draft-model", type=Path, default=demo.DRAFT)
    parser.add_argument("--prompt-file", type=Path, help="prompts, one a line (default: the packaged ones, by kind)")
    parser.add_argument("--length", type=int, default=4, help="tokens drafted per round")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    kinds = demo.prompts()
    if args.prompt_file:
        try:
            lines = args.prompt_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"--prompt-file: {error}")
        kinds = {args.prompt_file.stem: [line for line in lines if line.strip()]}
    try:
        llm = LLM(args.model, args.draft_model, {"num_speculative_tokens": args.length})
    except (ModelError, ParameterError) as error:
        parser.error(str(error))
    table = Table(title=f"{counted(args.length, 'token')} drafted per round", box=None)
    for heading in ("kind", "temperature", "acceptance", "emitted per round", "repeated", "by depth"):
        table.add_column(heading, justify="right")
    results = {}
    for kind, prompts in kinds.items():
        for temperature in args.temperature:
            params = SamplingParams(
                max_tokens=args.max_tokens, temperature=temperature, seed=0 if temperature else None, ignore_eos=True
            )
            found = results[f"{kind} {temperature:g}"] = measure(llm, prompts, params)
            table.add_row(
                kind,
                f"{temperature:g}",
                f"{found['acceptance_rate']:.3f}",
                f"{found['mean_emitted_per_round']:.2f}",
                f"{found['repeated_4_grams']:.2f}",
                " ".join(f"{share:.2f}" for share in found["acceptance_by_depth"]),
            )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
