"""What quantising costs: perplexity of a fixed text by weight format and KV cache dtype, and acceptance by pair.

    python -m bench.quality [--model PATH --draft-model PATH] [--text FILE] [--formats int8 int4] [--json FILE]

Perplexity is of the target, teacher-forced in windows. `over floats` is over the same weights as floats with a cache of
floats; `file` stands for the weights as the file has them. Acceptance is at 4 tokens drafted per round, greedy and at
temperature 0.7 with a seed, of the packaged prompts or those of a file, with `--chat` as users' messages.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.acceptance import measure
from bench.pair import asked, read_prompts
from bench.parser import Parser
from bench.perplexity import Windows, losses, perplexity
from lychee import LLM, ModelError, ParameterError, SamplingParams, demo
from lychee.models.llama import Llama
from lychee.models.model_files import FLOATS, open_model
from lychee.models.names import resolve_model
from lychee.models.quant_format import QuantFormat
from lychee.models.tokenizer_files import load_tokenizer
from lychee.nouns import counted

TEXT = Path(__file__).with_name("quality_text.txt")
OWN = "file"
INT4 = tuple(f"int4-g{group}{kind}" for group in (32, 64, 128) for kind in ("", "-sym", "-zero"))
FORMATS = (OWN, "int8", "int8-g32", *INT4)
CACHES = {"auto": None, "int8": torch.int8}
# Formats of target and draft.
PAIRS = (
    (FLOATS, FLOATS),
    *((pair) for quant in ("int8", "int4") for pair in ((quant, FLOATS), (FLOATS, quant), (quant, quant))),
)


def perplexities(args: argparse.Namespace, windows: Windows) -> Iterator[tuple[str, str, list[float] | str]]:
    """Format, KV cache dtype and the loss of each window, or why the format does not fit the model."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if device.type == "cpu" else None
    for name in (FLOATS, *args.formats):
        try:
            model = Llama.load(args.model, device, dtype, None if name == OWN else name)
        except ModelError as error:
            yield name, "", str(error)
            continue
        for cache in args.kv_cache_dtypes:
            yield name, cache, losses(model, windows, CACHES[cache], device)


def acceptances(args: argparse.Namespace, prompts: Sequence[str]) -> Iterator[tuple[str, str, float, dict[str, Any]]]:
    """Formats of target and draft, temperature, and what was measured."""
    for target, draft in PAIRS:
        config = {"num_speculative_tokens": 4}
        llm = LLM(args.model, args.draft_model, config, target_quant=target, draft_quant=draft)
        for temperature in (0.0, 0.7):
            params = SamplingParams(
                max_tokens=args.max_tokens, temperature=temperature, seed=0 if temperature else None, ignore_eos=True
            )
            yield target, draft, temperature, measure(llm, asked(llm, prompts, args), params)


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = Parser(__doc__)
    parser.add_argument("--model", help="default: the packaged pair")
    parser.add_argument("--draft-model", help="without it, no acceptance is measured of a --model")
    parser.add_argument("--text", type=Path, default=TEXT, metavar="FILE")
    parser.add_argument("--formats", nargs="*", default=FORMATS, help="file, int8, int4, ... (default: all)")
    parser.add_argument("--kv-cache-dtypes", nargs="+", choices=CACHES, default=list(CACHES))
    parser.add_argument("--window", type=int, default=256, help="tokens read together (default 256)")
    parser.add_argument("--max-windows", type=int, metavar="N", help="default: as many as the text fills")
    parser.add_argument("--prompt-file", type=Path, help="prompts, one a line (default: the packaged ones)")
    parser.add_argument("--chat", action="store_true", help="prompts are users' messages")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each prompt, for acceptance (default 64)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if args.model is None:
        args.model, args.draft_model = demo.TARGET, args.draft_model or demo.DRAFT
    if args.window < 2 or (args.max_windows is not None and args.max_windows < 1):
        parser.error("--window must be at least 2 and --max-windows at least 1")
    return args, parser


def main(argv: Sequence[str] | None = None) -> None:
    args, parser = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        args.model = resolve_model(args.model)
        args.draft_model = args.draft_model and resolve_model(args.draft_model)
        prompts = read_prompts(args)
        for name in args.formats:
            name == OWN or QuantFormat.parse(name)
        longest = open_model(args.model).config.max_positions
        if args.window > longest:
            parser.error(f"--window is {args.window}, must be at most the model's {longest}")
        text = args.text.read_text(encoding="utf-8")
        windows = Windows.of(load_tokenizer(args.model), text, args.window, args.max_windows)
        if not windows.tokens:
            parser.error(f"--text {args.text} does not fill a window of {args.window} tokens")
        found = show_perplexity(console, args, windows)
        record = {
            "perplexity": found,
            "acceptance": show_acceptance(console, args, prompts) if args.draft_model else [],
        }
    except (ModelError, ParameterError, OSError, ValueError) as error:
        parser.error(str(error))
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


def show_perplexity(console: Console, args: argparse.Namespace, windows: Windows) -> list[dict[str, Any]]:
    title = f"{counted(len(windows.tokens), 'window')} of {args.window} tokens, {windows.num_predicted} predicted"
    table = Table("weights", "KV cache", "perplexity", "over floats", title=title, box=None)
    rows: list[dict[str, Any]] = []
    for name, cache, result in perplexities(args, windows):
        if isinstance(result, str):
            rows.append({"weights": name, "refused": result})
            table.add_row(name, "", "", "does not fit")
            continue
        value = perplexity(result)
        base = next((row["perplexity"] for row in rows if "perplexity" in row), value)
        rows.append({"weights": name, "kv_cache": cache, "perplexity": value, "over_floats": value / base - 1})
        table.add_row(name, cache, f"{value:.4f}", f"{value / base - 1:+.3%}")
    console.print(table)
    for row in rows:
        if "refused" in row:
            console.print(row["refused"], highlight=False)
    return rows


def show_acceptance(console: Console, args: argparse.Namespace, prompts: Sequence[str]) -> list[dict[str, Any]]:
    headings = ("target", "draft", "temperature", "acceptance", "over floats", "emitted per round", "repeated")
    table = Table(*headings, title=f"4 tokens drafted per round, {counted(len(prompts), 'prompt')}", box=None)
    rows: list[dict[str, Any]] = []
    for target, draft, temperature, result in acceptances(args, prompts):
        rate = result["acceptance_rate"]
        base = next((row["acceptance_rate"] for row in rows if row["temperature"] == temperature), rate)
        rows.append({"target": target, "draft": draft, "temperature": temperature, **result})
        numbers = (f"{rate:.3f}", f"{rate / base - 1:+.1%}", f"{result['mean_emitted_per_round']:.2f}")
        table.add_row(target, draft, f"{temperature:g}", *numbers, f"{result['repeated_4_grams']:.2f}")
    console.print(table)
    return rows


if __name__ == "__main__":
    main()
