"""Milliseconds of one forward pass by number of rows, for a target and a draft: what a speculative round costs.

    python -m bench.rows [--model DIR --draft-model DIR] [--context 128] [--rows 1,2,3,5,9,17] [--json FILE]

A round that drafts k tokens costs k draft passes of one row and one target pass of k + 1 rows. Passes of all sizes are
timed in turn, so that a drift of the machine's speed hits all alike; the table gives medians.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from bench.parser import Parser
from lychee import demo
from lychee.models.compiled import CompiledLlama
from lychee.models.files import ModelError
from lychee.models.kv_cache import KVCache
from lychee.models.layout import Rows
from lychee.models.llama import Llama

BLOCK_SIZE = 16
WARM_UP = 6  # a pass is lowered when its kind has come a few times


class Pass:
    """A decode-class forward of a chain of `rows` nodes after `context` cached tokens."""

    def __init__(self, model: Llama, rows: int, context: int, device: torch.device) -> None:
        self.device = device
        num_blocks = -(-(context + rows) // BLOCK_SIZE)
        kv = KVCache.allocate(model.config, num_blocks, BLOCK_SIZE, model.weights.dtype, device)
        self.model = CompiledLlama(model, kv)
        self.rows = Rows.decode(
            tokens=[[3] * rows],
            parents=[range(-1, rows - 1)],
            context_lens=[context],
            block_tables=[range(num_blocks)],
            block_size=BLOCK_SIZE,
        )

    def time(self) -> float:
        """Milliseconds."""
        start = time.perf_counter()
        self.model.forward(self.rows)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return 1e3 * (time.perf_counter() - start)


def counts(text: str) -> list[int]:
    """Numbers of at least 1, between commas."""
    numbers = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}, must be numbers of at least 1 between commas")
    return numbers


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--model", type=Path, default=demo.TARGET)
    parser.add_argument("--draft-model", type=Path, default=demo.DRAFT)
    parser.add_argument("--context", type=int, default=128, help="cached tokens (default 128)")
    parser.add_argument("--rows", type=counts, default=[1, 2, 3, 5, 9, 17], help="numbers of rows to time")
    parser.add_argument("--repeats", type=int, default=60, help="passes of each size (default 60)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if device.type == "cpu" else None
    try:
        models = {"target": Llama.load(args.model, device, dtype), "draft": Llama.load(args.draft_model, device, dtype)}
    except ModelError as error:
        parser.error(str(error))
    sizes = args.rows
    limit = min(model.config.max_positions for model in models.values()) - max(sizes)
    if not 0 <= args.context <= limit or args.repeats < 1:
        parser.error(f"--context is {args.context}, must be from 0 to {limit}; --repeats at least 1")
    passes = {(name, rows): Pass(model, rows, args.context, device) for name, model in models.items() for rows in sizes}
    times: dict[tuple[str, int], list[float]] = {key: [] for key in passes}
    for repeat in range(args.repeats + WARM_UP):
        for key, one in passes.items():
            took = one.time()
            if repeat >= WARM_UP:
                times[key].append(took)
    result = {name: {rows: median(times[name, rows]) for rows in sizes} for name in models}
    table = Table(title=f"ms per forward pass, {args.context} cached tokens, {device}", box=None)
    for heading in ("rows", "target", "draft", "target / one row", "round / native step"):
        table.add_column(heading, justify="right")
    native = result["target"][sizes[0]]
    for rows in sizes:
        cost = (result["target"][rows] + (rows - 1) * result["draft"][sizes[0]]) / native
        target, draft = result["target"][rows], result["draft"][rows]
        table.add_row(str(rows), f"{target:.2f}", f"{draft:.2f}", f"{target / native:.2f}", f"{cost:.2f}")
    Console().print(table)
    print("A round must emit more tokens, on average, than its last column to be faster than native decoding.")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
