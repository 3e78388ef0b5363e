"""Time to the first token of a prompt that comes again, with the prefix cache and without: `python -m bench.prefix`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.parser import Parser
from lychee import LLM, ModelError, ParameterError, SamplingParams, demo


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--model", default=demo.TARGET)
    parser.add_argument("--draft-model", help="default: the packaged pair's; none with another --model")
    parser.add_argument("--target-quant", metavar="FORMAT")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 480], metavar="N", help="tokens of prompts")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args(argv)
    if args.repeats < 1 or min(args.lengths) < 1:
        parser.error("--repeats and --lengths must be at least 1")
    draft = args.draft_model or (demo.DRAFT if args.model == demo.TARGET else None)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    found: dict[bool, list[tuple[float, int]]] = {}
    try:
        for cache in (False, True):
            llm = LLM(args.model, draft, prefix_cache=cache, target_quant=args.target_quant)
            llm.warm_up(params)
            found[cache] = [first_token(llm, prompt(length), params, args.repeats) for length in args.lengths]
    except (ModelError, ParameterError) as error:
        parser.error(str(error))
    show(Console(width=None if sys.stdout.isatty() else 120), args.lengths, found)


def prompt(length: int) -> list[int]:
    """Token ids that do not repeat early."""
    return [5 + (37 * i + i // 7) % 300 for i in range(length)]


def first_token(llm: LLM, ids: list[int], params: SamplingParams, repeats: int) -> tuple[float, int]:
    """Median milliseconds, and tokens found in the cache; the first request is left out."""
    stats = [llm.generate([ids], params)[0].outputs[0].stats for _ in range(repeats + 1)][1:]
    return 1e3 * median(s.ttft_s or 0.0 for s in stats), stats[-1].cached_tokens


def show(console: Console, lengths: Sequence[int], found: dict[bool, list[tuple[float, int]]]) -> None:
    table = Table(box=None)
    for name in ("prompt tokens", "found", "ms without the cache", "ms with it", "times as fast"):
        table.add_column(name, justify="right")
    for length, (without, _), (with_it, hit) in zip(lengths, found[False], found[True], strict=True):
        table.add_row(str(length), str(hit), f"{without:.1f}", f"{with_it:.1f}", f"{without / with_it:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
