"""`lychee inspect`: a model's decode pass as the program that runs: what each op costs, and what floor it has here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from . import demo, waiting  # noqa: F401  # waiting acts when it is imported, before torch
from .inspect_pass import Effort, Line, Pass, inspect_pass
from .models.llama import Llama
from .models.names import resolve_model
from .nouns import counted
from .options import Parser, add_loading, add_models, check_writable, exit_code, load
from .runtime.checks import ParameterError
from .runtime.llm import LLM
from .runtime.memory_plan import MemoryPlan

SECONDS = 5.0  # of timing, with --measure
ROWS, CONTEXT = 1, 128
OF_A_PASS = ("rows", "context", "measure", "summary", "json")
"""Options that have no use with --memory."""


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="lychee inspect", description=__doc__, allow_abbrev=False)
    add_models(p, without_draft="there is only the model's pass")
    p.add_argument("--draft", action="store_true", help="the draft's pass instead of the model's")
    p.add_argument("--rows", type=int, metavar="N", help=f"rows of the pass, a chain of nodes (default {ROWS})")
    p.add_argument("--context", type=int, metavar="N", help=f"tokens cached before them (default {CONTEXT})")
    p.add_argument(
        "--measure", action="store_true", help="time every call, and say what share of its time the floor is"
    )
    p.add_argument("--summary", action="store_true", help="the table of ops alone, without the program")
    p.add_argument(
        "--memory", action="store_true", help="instead, what an engine of the model owns; with --draft, of the pair"
    )
    p.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there too")
    add_loading(p)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code("lychee inspect", lambda: _main(parser().parse_args(argv)))


def _main(args: argparse.Namespace) -> int:
    _check(args)
    llm = _loaded(args)
    if args.memory:
        show_plan(llm.memory_plan())
        return 0
    model, name = _model(args, llm)
    longest = model.config.max_positions
    rows, context = ROWS if args.rows is None else args.rows, CONTEXT if args.context is None else args.context
    if rows < 1 or context < 0 or rows + context > longest:
        raise ParameterError(
            f"--rows is {rows} and --context {context}, must be at least 1 and 0, together at most {longest}"
        )
    kv_dtype = torch.int8 if args.kv_cache_dtype == "int8" else model.weights.dtype
    found = inspect_pass(model, rows, context, kv_dtype, Effort(SECONDS if args.measure else 0.0))
    if not args.summary:
        print(found.header)
        print(*(f"{line.text}   # {_said(line)}" for line in found.lines), sep="\n", end="\n\n")
    show(found, f"{name}: {counted(rows, 'row')} after {counted(context, 'token')}")
    if args.json:
        record = {"model": name, "rows": rows, "context": context, **asdict(found)}
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse options that would be ignored."""
    for name in OF_A_PASS if args.memory else ():
        given = getattr(args, name)
        if given is not None and given is not False:
            raise ParameterError(f"--{name} has no use with --memory, which is not of a pass")
    if args.draft_model and not args.draft:
        raise ParameterError("--draft-model has no use without --draft")
    if args.draft_quant and not args.draft:
        raise ParameterError("--draft-quant has no use without --draft")
    if args.target_quant and args.draft and not args.memory:
        raise ParameterError("--target-quant has no use with --draft, whose pass is the draft's")
    check_writable("--json", args.json)


def _loaded(args: argparse.Namespace) -> LLM:
    """The model that is asked about, with its draft where that is."""
    packaged = args.model is None
    if args.draft and not packaged and not args.draft_model:
        raise ParameterError("--draft needs a --draft-model")
    target = demo.TARGET if packaged else resolve_model(args.model)
    draft = None
    if args.draft:
        draft = resolve_model(args.draft_model) if args.draft_model else demo.DRAFT
    return load("lychee inspect", args, target, draft, None, {})


def _model(args: argparse.Namespace, llm: LLM) -> tuple[Llama, str]:
    """The model whose pass is asked for, and what it is called."""
    if llm.device.type != "cpu":
        raise ParameterError(f"--device is {llm.device}, must be cpu: only there are passes lowered and replayed")
    if llm.draft is not None:
        return llm.draft, args.draft_model or "packaged draft"
    return llm.target, args.model or "packaged target"


def show_plan(plan: MemoryPlan) -> None:
    """What takes memory, and how much, as a table."""
    table = Table(box=None, pad_edge=False)
    table.add_column("memory")
    table.add_column("takes", justify="right")
    for row in plan.rows:
        table.add_row(*row)
    Console(width=120).print(table)


def _said(line: Line) -> str:
    told = f"{line.cost.bytes / 1e3:,.1f} kB, {line.cost.flops / 1e6:,.2f} MFLOP, floor {1e6 * line.floor:,.1f} us"
    return (
        told if line.seconds is None else f"{told}, {1e6 * line.seconds:,.1f} us: {_percent(line.floor, line.seconds)}"
    )


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def show(found: Pass, title: str) -> None:
    """The ops, their calls together, and what they were measured against."""
    measured = found.replay is not None
    table = Table(box=None, pad_edge=False)
    for heading in (
        "op",
        "calls",
        "MB",
        "MFLOP",
        "floor, us",
        *(("time, us", "floor / time", "of all time") if measured else ()),
    ):
        table.add_column(heading, justify="left" if heading == "op" else "right")
    whole = found.total
    for line in (*found.by_op, whole):
        cells = [line.op, str(line.calls), f"{line.cost.bytes / 1e6:,.2f}", f"{line.cost.flops / 1e6:,.2f}"]
        cells.append(f"{1e6 * line.floor:,.1f}")
        if line.seconds is not None and whole.seconds is not None:
            cells += [
                f"{1e6 * line.seconds:,.1f}",
                _percent(line.floor, line.seconds),
                _percent(line.seconds, whole.seconds),
            ]
        table.add_row(*cells)
    print(title)
    Console(width=120).print(table)
    peaks = found.peaks
    flops = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {dtype}" for dtype, rate in peaks.flops_per_s.items())
    print(f"peaks of this run: {peaks.bytes_per_s / 1e9:.1f} GB/s read, {flops} ({peaks.device})")
    if found.replay is not None:
        share = _percent(whole.floor, found.replay)
        print(f"replayed as one: {1e6 * found.replay:,.1f} us, of which the floor is {share}")
