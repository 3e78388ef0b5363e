"""The options of `lychee check`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence as Seq
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from tqdm import tqdm

from .. import demo, waiting  # noqa: F401  # waiting acts when it is imported, before torch
from ..options import (
    Parser,
    add_lengths,
    add_loading,
    add_models,
    add_prompts,
    add_room,
    add_speculative_config,
    check_writable,
    exit_code,
    given_prompts,
    load,
    speculative_config,
)
from ..runtime.checks import ParameterError, check_int, refuse
from ..runtime.sampling_params import SamplingParams
from .proofs import Plan, num_seeds, num_steps, prove
from .report import advice, as_json, details, summary, table
from .samples import PER_REQUEST
from .subject import Subject

LEAST_SAMPLES, MOST_SAMPLES, NODES = 16, 64, 768
"""Without --samples as many are drawn as have NODES nodes in one round together, between these."""
PACKAGED = 4  # prompts of each kind of the packaged ones: so few that two slow cores take under two minutes
ABOUT = """Prove on a pair of models that speculation is lossless: greedy and seeded runs have native decoding's tokens,
unseeded ones its distribution, and engines broken on purpose are caught. Exit code 0: all that is so; 1: something is
not; 2: bad input."""


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="lychee check", description=ABOUT, allow_abbrev=False)
    add_models(p, without_draft="there is nothing to check")
    add_prompts(p, without_any=f"the first {PACKAGED} of each kind of the packaged ones")
    p.add_argument(
        "--max-tokens", type=int, default=64, help="tokens per prompt of greedy and seeded runs (default 64)"
    )
    p.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help=f"samples of each of 6 prompts (default {MOST_SAMPLES}, of trees with many nodes down to {LEAST_SAMPLES})",
    )
    p.add_argument("--temperature", type=float, help="of sampled runs (default 1; the packaged pair's is 0.8)")
    p.add_argument("--top-p", type=float, help="1 is off (default 1; the packaged pair's is 0.9)")
    p.add_argument("--top-k", type=int, default=0, help="0 is off")
    p.add_argument("--min-p", type=float, default=0.0, help="0 is off")
    p.add_argument("--seed", type=int, default=1, help="the first of the seeds; the whole check follows (default 1)")
    add_lengths(p)
    add_speculative_config(p)
    add_room(p)
    p.add_argument("--json", type=Path, metavar="FILE.json", help="write what was found as JSON")
    add_loading(p)
    return p


def main(argv: Seq[str] | None = None) -> int:
    return exit_code("lychee check", lambda: _main(parser().parse_args(argv)))


def _main(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    packaged = args.model is None
    if not packaged and args.draft_model is None:
        raise ParameterError("no --draft-model: there is no speculation to check")
    config = speculative_config(args, tree="chain")  # rounds in which `auto` drafts nothing would prove nothing
    if config.max_draft_len == 0:
        name = "num_speculative_tokens" if config.num_speculative_tokens == 0 else "max_draft_len"
        raise refuse(name, 0, "at least 1: where nothing is drafted there is no speculation to check")
    texts = _texts(args)
    if args.samples is not None:
        check_int("--samples", args.samples, 1)
    following = num_seeds(len(texts), args.samples or MOST_SAMPLES) - 1
    if not -(2**63) <= args.seed < 2**63 - following:
        raise refuse(
            "--seed", args.seed, f"in -2^63..2^63 - {following + 1}: the {following} that follow it are used too"
        )
    check_writable("--json", args.json)
    sampling = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=_default(args.temperature, demo.TEMPERATURE if packaged else 1.0),
        top_p=_default(args.top_p, demo.TOP_P if packaged else 1.0),
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
    )
    if sampling.greedy:
        raise refuse("--temperature", args.temperature, "at least 1e-5; greedy decoding is always checked too")
    target = demo.TARGET if packaged else args.model
    draft = args.draft_model or demo.DRAFT
    room = {name: getattr(args, name) for name in ("max_model_len", "num_blocks") if getattr(args, name) is not None}
    llm = load("lychee check", args, target, draft, config, {"max_num_seqs": PER_REQUEST, **room})
    subject = Subject(llm)
    prompts = tuple(llm.maker.sequences(text, sampling, 0)[0].prompt for text in texts)
    most = max(shape.num_nodes for shape in subject.engine.shapes)
    plan = Plan(prompts, sampling, args.samples or max(LEAST_SAMPLES, min(MOST_SAMPLES, NODES // most)))
    with tqdm(total=num_steps(plan), desc="checking", unit="step", leave=False, disable=None) as bar:
        results = prove(subject, plan, bar.update)
    seconds = time.perf_counter() - start
    if args.json:
        named = {"model": str(target), "draft_model": str(draft), **_configured(args, subject)}
        found = as_json(plan, results, named, seconds)
        args.json.write_text(json.dumps(found, ensure_ascii=False, indent=1), encoding="utf-8")
    Console().print(table(plan, results))
    for line in details(results, lambda token: llm.tokenizer.decode([token])):
        print(line)
    print(summary(results, not config.fallback_sampling, seconds))
    if results.lossless:
        for line in advice(plan, results):
            print(line)
    return 0 if results.lossless and results.powerful else 1


def _configured(args: argparse.Namespace, subject: Subject) -> dict[str, Any]:
    """How the pair was loaded and accepts, as JSON has it. accepted_by: of the sampled proof."""
    llm = subject.llm
    return {
        "device": str(llm.device),
        "dtype": str(llm.target.weights.dtype).removeprefix("torch."),
        **{name: getattr(args, name) for name in ("target_quant", "draft_quant", "kv_cache_dtype")},
        "max_model_len": llm.max_model_len,
        "num_blocks": subject.engine.scheduler.pool.num_blocks,
        "speculative_config": asdict(llm.speculative_config),
        "accepted_by": "traversal" if subject.engine.rule.traversal else "rejection",
    }


def _default(given: float | None, default: float) -> float:
    return default if given is None else given


def _texts(args: argparse.Namespace) -> list[str]:
    if given := given_prompts(args):
        return given
    return [prompt for kind in demo.prompts().values() for prompt in kind[:PACKAGED]]
