"""End-to-end speed at real sizes without real weights: random models, and a drafter as right as it is dialled to be.

    python -m bench.dialled [--target llama-2-7b --draft tinyllama-1.1b] [--draft-format int8] [--batches 1,4,8,16,32]
                            [--acceptance 0.5,0.6,0.7,0.8] [--trees 4] [--json FILE]

The draft model runs for its cost; what it proposes is replaced by the target's own native tokens, corrupted at the
dialled rate (`dialled_drafter.py`). So times, memory and tokens are real and acceptance is not: every row says
`dialled`. Each row is compared with our own native decoding of the same requests in the same run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from bench.dialled_drafter import DialledDrafter, Native, landed, rank_rates
from bench.parser import Parser
from bench.random_model import FORMATS, SHAPES, config_of, random_model
from bench.rows import counts
from lychee.models.kv_cache import KVCache
from lychee.models.llama import Llama
from lychee.runtime.blocks import BlockPool
from lychee.runtime.controller import Fixed
from lychee.runtime.drafter import ModelDrafter
from lychee.runtime.engine import Engine
from lychee.runtime.metrics import Metrics, RequestStats
from lychee.runtime.sampling_params import SamplingParams
from lychee.runtime.scheduler import Scheduler
from lychee.runtime.sequence import Mode, Sequence
from lychee.runtime.tree import TreeShape, parse_tree

BLOCK_SIZE, MAX_BATCHED = 16, 2048


class _Silent:
    """A detokenizer where there is no text."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


@dataclass(frozen=True)
class Row:
    """One way of decoding one batch. Seconds; `acceptance` is the dial and `landed` what came of it, None natively."""

    way: str
    batch: int
    acceptance: float | None
    landed: float | None
    seconds: float
    tokens_per_s: float
    ttft: float
    speedup: float
    owned_bytes: int


def requests(batch: int, prompt_len: int, max_tokens: int, vocab: int) -> list[Sequence]:
    """Greedy requests with prompts of random tokens, the same each time."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(vocab, (batch, prompt_len), generator=generator).tolist()
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    limit = prompt_len + max_tokens
    made = []
    for i, prompt in enumerate(prompts):
        stats = RequestStats(prompt_tokens=prompt_len)
        known = (i, i, 0, tuple(prompt), params, Mode.GREEDY, i, limit, frozenset[int](), ())
        made.append(Sequence(*known, detokenizer=_Silent(), stats=stats))  # type: ignore[arg-type]
    return made


def engine_of(target: Llama, draft: Llama | None, num_blocks: int, batch: int, shape: TreeShape) -> Engine:
    device = target.weights.norm.device
    allocate = [
        KVCache.allocate(model.config, num_blocks, BLOCK_SIZE, model.weights.dtype, device)
        for model in (target, draft)
        if model is not None
    ]
    vocab = target.config.vocab_size
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    drafter = None if draft is None else ModelDrafter(draft, allocate[1], pool, vocab, MAX_BATCHED)
    scheduler = Scheduler(pool, batch, MAX_BATCHED)
    return Engine(target, allocate[0], scheduler, drafter, Fixed(shape), vocab=vocab)


def run(engine: Engine, seqs: list[Sequence]) -> float:
    """Seconds until all of them have ended."""
    device = engine.kv.storage.device
    started = time.perf_counter()
    for seq in seqs:
        engine.add(seq)
    while not engine.idle:
        engine.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def owned_bytes(engine: Engine) -> int:
    """Weights and KV storage, of both models where there are two."""
    found = engine.target.model.weights.num_bytes + engine.kv.storage.nbytes
    if isinstance(engine.drafter, DialledDrafter):
        found += engine.drafter.model.model.weights.num_bytes + engine.drafter.model.kv.storage.nbytes
    return found


def measure(
    target: Llama,
    draft: Llama,
    batch: int,
    lengths: tuple[int, int],
    dials: Seq[float],
    trees: Seq[str],
    sibling: float,
) -> list[Row]:
    """Native decoding of one batch, then every dial with every tree."""
    prompt_len, max_tokens = lengths
    vocab = min(target.config.vocab_size, draft.config.vocab_size)
    shapes = {tree: shape_of(tree) for tree in trees}
    most = max(shape.num_nodes for shape in shapes.values())
    num_blocks = batch * -(-(prompt_len + max_tokens + most) // BLOCK_SIZE)

    def fresh() -> list[Sequence]:
        return requests(batch, prompt_len, max_tokens, vocab)

    engine = engine_of(target, None, num_blocks, batch, TreeShape.chain(0))
    run(engine, requests(batch, prompt_len, min(max_tokens, 12), vocab))  # compiles, and lowers what comes again
    seqs = fresh()
    native_s = run(engine, seqs)
    native: Native = {seq.prompt: seq.emitted for seq in seqs}
    rows = [_row("native", batch, None, None, native_s, native_s, seqs, owned_bytes(engine))]
    del engine
    for tree, shape in shapes.items():
        engine = engine_of(target, draft, num_blocks, batch, shape)
        assert isinstance(engine.drafter, ModelDrafter)
        model = engine.drafter
        for dial in dials:
            engine.drafter = DialledDrafter(model, native, rank_rates(dial, sibling), vocab)
            run(engine, requests(batch, prompt_len, min(max_tokens, 24), vocab))
            engine.metrics = Metrics()
            seqs = fresh()
            seconds = run(engine, seqs)
            if {seq.prompt: seq.emitted for seq in seqs} != native:
                raise RuntimeError(f"batch {batch}, tree {tree}: speculative tokens are not the native ones")
            found = landed(engine.metrics)
            owned = owned_bytes(engine)
            rows.append(_row(f"dialled, tree {tree}", batch, dial, found, seconds, native_s, seqs, owned))
    return rows


def _row(
    way: str,
    batch: int,
    dial: float | None,
    found: float | None,
    seconds: float,
    native_s: float,
    seqs: list[Sequence],
    owned: int,
) -> Row:
    tokens = sum(seq.num_emitted for seq in seqs)
    ttft = median(seq.stats.ttft_s or 0.0 for seq in seqs)
    return Row(way, batch, dial, found, seconds, tokens / seconds, ttft, native_s / seconds, owned)


def shape_of(tree: str) -> TreeShape:
    """A number K is a chain of K; more numbers are children by depth. Raises ParameterError or ValueError."""
    if tree.isdecimal():
        return TreeShape.chain(int(tree))
    shape = parse_tree(tree, 64, 32)
    if not isinstance(shape, TreeShape):
        raise ValueError(f"a tree is {tree!r}, must be a number, or numbers between commas")
    return shape


def show(rows: Seq[Row], title: str) -> None:
    table = Table(title=title, box=None)
    for heading in ("batch", "", "dial", "landed", "seconds", "tokens/s", "TTFT, ms", "speedup", "owned, GiB"):
        table.add_column(heading, justify="left" if not heading else "right")
    for row in rows:
        dial = ["-", "-"] if row.acceptance is None else [f"{row.acceptance:.2f}", f"{row.landed or 0:.3f}"]
        numbers = f"{row.seconds:.2f}", f"{row.tokens_per_s:.1f}", f"{1e3 * row.ttft:.1f}", f"{row.speedup:.2f}"
        table.add_row(str(row.batch), row.way, *dial, *numbers, f"{row.owned_bytes / 2**30:.2f}")
    Console(width=130).print(table)


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = [-1.0]
    if any(not 0 <= rate <= 1 for rate in rates):
        raise argparse.ArgumentTypeError(f"is {text!r}, must be rates from 0 to 1 between commas")
    return rates


def main(argv: Seq[str] | None = None) -> None:
    on_cuda = torch.cuda.is_available()
    p = Parser(__doc__)
    names = f"one of {', '.join(SHAPES)}, or a config.json"
    p.add_argument("--target", default="llama-2-7b" if on_cuda else "tiny", help=f"{names} (default %(default)s)")
    p.add_argument(
        "--draft", default="tinyllama-1.1b" if on_cuda else "tiny-draft", help="the same (default %(default)s)"
    )
    p.add_argument("--target-format", choices=FORMATS, default="float")
    p.add_argument("--draft-format", choices=FORMATS, default="float")
    p.add_argument("--batches", type=counts, default=[1, 4, 8, 16, 32])
    p.add_argument("--acceptance", type=_rates, default=[0.5, 0.6, 0.7, 0.8])
    p.add_argument("--sibling", type=float, default=0.3, help="share of what earlier ranks miss that the next rank has")
    p.add_argument("--trees", default="4", help="chains by length or children by depth, between semicolons (default 4)")
    p.add_argument("--prompt-len", type=int, default=512)
    p.add_argument("--max-tokens", type=int, default=128)
    p.add_argument("--json", type=Path, metavar="FILE")
    args = p.parse_args(argv)
    device, dtype = ("cuda", torch.bfloat16) if on_cuda else ("cpu", torch.float32)
    try:
        configs = config_of(args.target), config_of(args.draft)
        trees = args.trees.split(";")
        for tree in trees:
            shape_of(tree)
    except ValueError as error:
        p.error(str(error))
    if configs[0].vocab_size != configs[1].vocab_size:
        p.error(
            f"--target has {configs[0].vocab_size} tokens and --draft {configs[1].vocab_size}: they must share them"
        )
    target = random_model(configs[0], args.target_format, dtype, device)
    draft = random_model(configs[1], args.draft_format, dtype, device, seed=1)
    rows: list[Row] = []
    title = f"{args.target} ({args.target_format}) with {args.draft} ({args.draft_format}), random weights, dialled; "
    title += f"{args.prompt_len} in, {args.max_tokens} out, {device}, {str(dtype).removeprefix('torch.')}"
    for batch in args.batches:
        lengths = args.prompt_len, args.max_tokens
        rows += measure(target, draft, batch, lengths, args.acceptance, trees, args.sibling)
        if args.json:
            record = {"title": title, "rows": [asdict(row) for row in rows]}
            args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    show(rows, title)


if __name__ == "__main__":
    main()
