"""Studies that compare policies point by point: of draft lengths, kinds of text, temperature, context and batch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from bench.pair import asked, read_prompts
from lychee import LLM, ParameterError, SamplingParams, demo
from lychee.runtime.alternate import AUTO, NATIVE, Sample, alternate, ratio, speeds, totals

from .study import Lines, Study

TEXT = Path(__file__).parents[1] / "quality_text.txt"
LADDER = (NATIVE, "4", "8", "16", "32", "window", AUTO)
FEW = (NATIVE, "4", "8", AUTO)
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Point:
    """A place of a sweep: what is completed there, and how. Every group of prompts runs as one batch."""

    x: Any
    groups: Sequence[Sequence[Any]]
    params: SamplingParams


def sampling(args: argparse.Namespace, **changes: Any) -> SamplingParams:
    given = {"temperature": args.temperature, "max_tokens": args.max_tokens, "ignore_eos": True, **changes}
    return SamplingParams(**given)


def sweep(
    llm: LLM, args: argparse.Namespace, points: Sequence[Point], policies: Sequence[str], decoding: bool = False
) -> list[dict[str, Any]]:
    """A row for each point and policy. `decoding` leaves out the time to the first token, of groups of one."""
    rows: list[dict[str, Any]] = []
    for number, point in enumerate(points):
        label = f"point {number + 1} of {len(points)}"
        samples = alternate(llm, point.groups, point.params, policies, args.runs, label)
        rows += compared(point.x, samples, policies, _decoding if decoding else speeds)
    return rows


def compared(
    x: Any, samples: Sequence[Sample], policies: Sequence[str], rate: Callable[[Sequence[Sample]], list[float]] = speeds
) -> list[dict[str, Any]]:
    """A row for each policy. rate: tokens per second of each run."""
    by = {policy: [sample for sample in samples if sample.policy == policy] for policy in policies}
    native, rows = rate(by[NATIVE]), []
    for policy, found in by.items():
        said, own = totals(found), rate(found)
        rows.append(
            {
                "x": x,
                "policy": policy,
                "tokens/s": float(np.median(own)),
                "over native": ratio(own, native),
                "emitted per round": said["mean_emitted_per_round"],
                "acceptance": said["acceptance_rate"],
                "wasted share": said["wasted_fraction"],
            }
        )
    return rows


def _decoding(samples: Sequence[Sample]) -> list[float]:
    """Tokens per second after the first one, of each run."""
    found: dict[int, list[tuple[int, float]]] = {}
    for sample in samples:
        for stats in sample.requests:
            if stats.e2e_s is not None and stats.ttft_s is not None:
                found.setdefault(sample.run, []).append((stats.emitted - 1, stats.e2e_s - stats.ttft_s))
    return [sum(n for n, _ in rows) / sum(s for _, s in rows) for _, rows in sorted(found.items())]


def study(title: str, x: str, rows: list[dict[str, Any]], logarithmic: bool = False) -> Study:
    """Rows of a sweep with `x` named, and its figure: speed over native by x, a line for each policy."""
    lines: dict[str, dict[Any, float]] = {}
    for row in rows:
        if row["policy"] != NATIVE:
            lines.setdefault(str(row["policy"]), {})[row["x"]] = row["over native"][0]
    named: list[Mapping[str, Any]] = [{x: row["x"], **{k: v for k, v in row.items() if k != "x"}} for row in rows]
    return Study(title, named, Lines(x, "speed over native decoding", lines, 1.0, logarithmic))


def groups(llm: LLM, args: argparse.Namespace) -> list[list[Any]]:
    """The prompts, each by itself. Raises ParameterError where there are none."""
    prompts = read_prompts(args)[: args.prompts]
    if not prompts:
        raise ParameterError(f"--prompt-file {args.prompt_file} has no prompts")
    return [[prompt] for prompt in asked(llm, prompts, args)]


def ladder(llm: LLM, args: argparse.Namespace) -> Study:
    """Fixed draft lengths beside the controllers."""
    point = Point("all prompts", groups(llm, args), sampling(args))
    return study("Draft lengths and controllers", "prompts", sweep(llm, args, [point], LADDER))


def mixture(llm: LLM, args: argparse.Namespace) -> Study:
    """English, Chinese and code by turns: what is right for one is wrong for the next."""
    kinds = demo.prompts() if args.prompt_file is None else {args.prompt_file.stem: read_prompts(args)}
    names = list(kinds)
    texts = [prompt for some in zip(*kinds.values(), strict=True) for prompt in some][: args.prompts]
    samples = alternate(llm, [[p] for p in asked(llm, texts, args)], sampling(args), LADDER, args.runs)
    rows: list[dict[str, Any]] = []
    for place, kind in enumerate([*names, "all"]):
        rows += compared(kind, [s for s in samples if kind == "all" or s.group % len(names) == place], LADDER)
    return study("A mixture of texts", "kind of text", rows)


def temperature(llm: LLM, args: argparse.Namespace) -> Study:
    """From greedy to hot: the flatter the target, the less there is to accept."""
    alone = groups(llm, args)
    points = [Point(t, alone, sampling(args, temperature=t)) for t in TEMPERATURES]
    return study("Temperature", "temperature", sweep(llm, args, points, FEW))


def context(llm: LLM, args: argparse.Namespace) -> Study:
    """Acceptance and speed after the first token as the context grows, on a fixed text."""
    text = llm.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    most = llm.max_model_len - args.max_tokens
    lengths = [n for n in (64 << i for i in range(12)) if n < most] + [most]
    places = args.prompts or 4
    points = []
    for length in lengths:
        starts = [i * 61 for i in range(places)]
        texts = [[list(islice(cycle(text), start, start + length))] for start in starts]
        points.append(Point(length, texts, sampling(args)))
    return study("Context", "tokens of context", sweep(llm, args, points, FEW, decoding=True), logarithmic=True)


def batch(llm: LLM, args: argparse.Namespace) -> Study:
    """Requests that run together: where the target's pass is full, drafts stop paying."""
    prompts = [prompt for (prompt,) in groups(llm, args)]
    points = [Point(n, [list(islice(cycle(prompts), n))], sampling(args)) for n in BATCHES]
    return study("Batch", "requests together", sweep(llm, args, points, FEW), logarithmic=True)
