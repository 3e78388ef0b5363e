"""What streams feel while a long prompt arrives, by how many of its tokens are prefilled between two of their rounds.

    python -m bench.long_prompt [--model PATH --draft-model PATH] [--streams 8] [--tokens 400] [--budgets 32 128]

Streams decode, a long prompt comes, and every gap between two rounds of the streams is taken until it has its first
token. Budgets are taken in random order in each run. The last column is what one forward pass for both could win at
most: milliseconds of a pass over the chunk and then one over a token of each stream, over those of one pass with both.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.pair import add_pair, load
from bench.parser import Parser
from lychee import LLM, ModelError, ParameterError, SamplingParams
from lychee.models.layout import Rows
from lychee.runtime.config import SpeculativeConfig
from lychee.runtime.engine import Engine
from lychee.runtime.sequence import Sequence as Request


def arrival(engine: Engine, streams: Sequence[Request], late: Request) -> tuple[list[float], float, float]:
    """Milliseconds between the streams' rounds until the late request has a token, and one round more; seconds to
    that token; tokens per second of all. Raises ValueError where a stream ends meanwhile."""
    for seq in streams:
        engine.add(seq)
    while not all(seq.num_emitted > 4 for seq in streams):
        engine.step()
    before = sum(seq.num_emitted for seq in streams)
    engine.add(late)
    begin = last = time.perf_counter()
    gaps, first = [], 0.0
    while True:
        chunks = engine.step()
        now = time.perf_counter()
        if any(chunk.request_id != late.request_id for chunk in chunks):
            gaps.append(1e3 * (now - last))
            last = now
            if first:
                break
        if late.num_emitted and not first:
            first = now - begin
    if any(seq.finished for seq in streams):
        raise ValueError("a stream ended before the long prompt had been read; take fewer streams or a shorter prompt")
    tokens = sum(seq.num_emitted for seq in (*streams, late)) - before
    for seq in (*streams, late):
        engine.abort(seq)
    return gaps, first, tokens / (last - begin)


def both_over_one(engine: Engine, streams: int, chunk: int, context: int) -> float:
    """Times as long as one pass with a chunk and a token of each stream that two passes take, least of five each."""
    size, forward = engine.kv.block_size, engine.target.forward
    per = -(-(context + max(chunk, 1)) // size)
    where = {
        "context_lens": [context] * (streams + 1),
        "block_tables": [[*range(i * per, (i + 1) * per)] for i in range(streams + 1)],
    }

    def prefill(which: slice, tokens: list[list[int]]) -> Callable[[], Any]:
        places = {name: values[which] for name, values in where.items()}
        ends = np.cumsum([len(some) for some in tokens]) - 1
        return lambda: forward(Rows.prefill(tokens, **places, block_size=size, logit_rows=ends.tolist()))

    ones = [[3]] * streams
    rest = {name: values[1:] for name, values in where.items()}
    two = [
        prefill(slice(0, 1), [[3] * chunk]),
        lambda: forward(Rows.decode(ones, [[-1]] * streams, **rest, block_size=size)),
    ]
    apart, together = sum(map(_least, two)), _least(prefill(slice(0, None), [[3] * chunk, *ones]))
    return apart / together


def _least(run: Callable[[], Any]) -> float:
    times = []
    for turn in range(10):
        begin = time.perf_counter()
        run()
        if turn > 4:  # programs are lowered by then
            times.append(time.perf_counter() - begin)
    return min(times)


def measure(
    llm: LLM, native: bool, budgets: Sequence[int], streams: int, tokens: int, runs: int
) -> list[dict[str, Any]]:
    engine, draws, number = llm.engine(native), np.random.default_rng(0), 0
    found = {budget: {"budget": budget, "gaps_ms": [], "ttft_s": [], "tokens_per_second": []} for budget in budgets}
    params = SamplingParams(max_tokens=llm.max_model_len - 16, temperature=0.0, ignore_eos=True)

    def request(length: int) -> Request:
        nonlocal number
        number += 1
        ids = [int(i) for i in draws.integers(5, llm.vocab, length)]
        (seq,) = llm.maker.sequences(ids, params if length < 16 else SamplingParams(max_tokens=8), number)
        return seq

    order, shuffle = list(budgets), random.Random(0)
    for run in range(runs + 1):
        shuffle.shuffle(order)
        for budget in order:
            engine.scheduler.prefill_budget = budget
            gaps, seconds, speed = arrival(engine, [request(8) for _ in range(streams)], request(tokens))
            if run:
                found[budget]["gaps_ms"] += gaps
                found[budget]["ttft_s"].append(seconds)
                found[budget]["tokens_per_second"].append(speed)
    for budget, row in found.items():
        row["two_passes_over_one"] = both_over_one(engine, streams, budget, min(256, llm.max_model_len - budget))
    return list(found.values())


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    add_pair(parser)
    parser.add_argument("--native", action="store_true", help="without the draft")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=400, help="of the long prompt (default 400)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[32, 64, 128, 256, 512], metavar="N")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    for name, least in (("streams", args.streams), ("budgets", min(args.budgets)), ("runs", args.runs)):
        if least < 1:
            parser.error(f"--{name} is {least}, must be at least 1")
    try:
        llm = load(args, SpeculativeConfig(), prefix_cache=False, max_num_batched_tokens=max(512, *args.budgets))
        llm.warm_up(native=args.native)
        found = measure(llm, args.native, args.budgets, args.streams, args.tokens, args.runs)
    except (ModelError, ParameterError, ValueError, OSError) as error:
        parser.error(str(error))
    headings = "budget", "gap p50 ms", "p99", "longest", "first token s", "tokens/s", "two passes / one"
    shown = Table(*headings, box=None)
    for row in found:
        gaps = np.array(row["gaps_ms"])
        times = [*np.quantile(gaps, [0.5, 0.99]), gaps.max()]
        others = np.median(row["ttft_s"]), np.median(row["tokens_per_second"])
        shown.add_row(
            str(row["budget"]),
            *(f"{ms:.1f}" for ms in times),
            f"{others[0]:.3f}",
            f"{others[1]:.1f}",
            f"{row['two_passes_over_one']:.3f}",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(shown)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
