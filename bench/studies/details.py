"""Studies of one thing each: latency, what a formula promises, memory, and several drafts for one target."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from bench.pair import load
from lychee import LLM
from lychee.runtime.alternate import AUTO, NATIVE, alternate, draft_share, ratio, speeds, totals
from lychee.runtime.config import SpeculativeConfig

from .study import Lines, Study
from .sweeps import groups, sampling

PERCENTILES = (50, 90, 99)
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)


def latency(llm: LLM, args: argparse.Namespace) -> Study:
    """Milliseconds to the first token and between what a reader of a stream gets."""
    policies = (NATIVE, "4", AUTO)
    samples = alternate(llm, groups(llm, args), sampling(args), policies, args.runs)
    rows, lines = [], {}
    for policy in policies:
        mine = [s for s in samples if s.policy == policy]
        first = [1e3 * stats.ttft_s for s in mine for stats in s.requests if stats.ttft_s is not None]
        gaps = [1e3 * gap for s in mine for gap in s.gaps]
        values = {
            f"{name}, p{p}": float(np.percentile(found, p))
            for name, found in (("first token, ms", first), ("between chunks, ms", gaps))
            for p in PERCENTILES
        }
        tokens = sum(s.tokens for s in mine)
        values["per token, ms"] = sum(gaps) / max(1, tokens - len(first))
        rows.append({"policy": policy, **values})
        lines[policy] = values
    return Study("Latency", rows, Lines("", "milliseconds", lines))


def theory(llm: LLM, args: argparse.Namespace) -> Study:
    """Speed over native of chains of k: measured, and as acceptance and the draft's cost c predict it.

    A round of the model emits E(k) = 1 + a_1 + ... + a_k tokens, a_d being the measured share of rounds accepted to
    depth d, in the time of 1 + k c native passes; (k + 1) / (1 + (k + 1) c) is the bound where everything is accepted.
    """
    alone, params = groups(llm, args), sampling(args)
    samples = alternate(llm, alone, params, (NATIVE, *map(str, LENGTHS)), args.runs)
    native = speeds(s for s in samples if s.policy == NATIVE)
    longest = totals(s for s in samples if s.policy == str(LENGTHS[-1]))["acceptance_by_depth"]
    reached = np.array(longest)
    cost = draft_share(llm)
    rows: list[dict[str, Any]] = []
    for k in LENGTHS:
        found = [s for s in samples if s.policy == str(k)]
        rows.append(
            {
                "draft length": k,
                "emitted per round": totals(found)["mean_emitted_per_round"],
                "E(k)": float(1 + reached[:k].sum()),
                "measured": ratio(speeds(found), native),
                "E(k) / (1 + k c)": float((1 + reached[:k].sum()) / (1 + k * cost)),
                "(k + 1) / (1 + (k + 1) c)": (k + 1) / (1 + (k + 1) * cost),
            }
        )
    lines = {
        "measured": {row["draft length"]: row["measured"][0] for row in rows},
        **{
            name: {row["draft length"]: row[name] for row in rows}
            for name in ("E(k) / (1 + k c)", "(k + 1) / (1 + (k + 1) c)")
        },
    }
    note = f"c, a draft pass as a multiple of a target pass of one row, is {cost:.3f}"
    return Study("Theory", rows, Lines("draft length", "speed over native decoding", lines, 1.0), [note])


def memory(llm: LLM, args: argparse.Namespace) -> Study:
    """MiB that engines own, by the plan that is made before anything is allocated."""
    rows: list[dict[str, Any]] = []
    lines: dict[str, dict[str, float]] = {}
    for quant in (None, "int8"):
        pair = llm if quant is None else load(_quantised(args, quant), SpeculativeConfig(tree="auto"))
        for native in (True, False):
            plan = pair.memory_plan(native)
            parts = {
                "weights, MiB": sum(model.weights for model in plan.models) / 2**20,
                "KV, MiB": plan.kv / 2**20,
                "activations, MiB": plan.arenas / 2**20,
                "all, MiB": plan.total / 2**20,
            }
            name = f"{'native' if native else 'speculative'}, {quant or 'as loaded'}"
            rows.append({"engine": name, **parts})
            lines[name] = parts
    return Study("Memory", rows, Lines("", "MiB", lines))


def _quantised(args: argparse.Namespace, quant: str) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), "target_quant": quant, "draft_quant": quant})


def draft_size(llm: LLM, args: argparse.Namespace) -> Study:
    """Several drafts for one target: their size, their cost, how often they agree, and what comes of it."""
    rows: list[dict[str, Any]] = []
    for draft in args.draft_models or [args.draft_model, args.model]:
        given = argparse.Namespace(**{**vars(args), "draft_model": draft})
        pair = llm if draft == args.draft_model else load(given, SpeculativeConfig(tree="auto"), prefix_cache=False)
        pair.warm_up(sampling(args))
        alone = groups(pair, args)
        samples = alternate(pair, alone, sampling(args), (NATIVE, "4", AUTO), args.runs)
        by = {policy: [s for s in samples if s.policy == policy] for policy in (NATIVE, "4", AUTO)}
        native = speeds(by[NATIVE])
        plan = pair.memory_plan()
        target, own = (model.weights for model in plan.models)
        rows.append(
            {
                "draft": str(draft).rstrip("/").rsplit("/", 1)[-1],
                "weights / target's": own / target,
                "c": draft_share(pair),
                "acceptance": totals(by["4"])["acceptance_rate"],
                "chain of 4 over native": ratio(speeds(by["4"]), native),
                "auto over native": ratio(speeds(by[AUTO]), native),
            }
        )
    lines = {
        name: {row["draft"]: row[name] if isinstance(row[name], float) else row[name][0] for row in rows}
        for name in ("acceptance", "chain of 4 over native", "auto over native")
    }
    return Study("Draft models", rows, Lines("draft", "share, or multiple of native speed", lines, 1.0))
