"""The options of `lychee check`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence as Seq
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from tqdm import tqdm

from .. import demo
from ..options import (
    Parser,
    add_lengths,
    add_loading,
    add_models,
    add_speculative_config,
    check_writable,
    exit_code,
    load,
    prompts_of_file,
    speculative_config,
)
from ..runtime.checks import ParameterError, check_int, refuse
from ..runtime.sampling_params import SamplingParams
from .proofs import Plan, num_steps, prove
from .report import as_json, details, summary, table
from .samples import PER_REQUEST
from .subject import Subject

ABOUT = """Prove on a pair of models that speculation is lossless: greedy and seeded runs have native decoding's tokens,
unseeded ones its distribution, and engines broken on purpose are caught. Exit code 0: all that is so; 1: something is
not; 2: bad input."""


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="lychee check", description=ABOUT, allow_abbrev=False)
    add_models(p, without_draft="there is nothing to check")
    source = p.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the prompt; without any, the packaged ones")
    source.add_argument("--prompt-file", type=Path, metavar="FILE", help="prompts, one a line")
    p.add_argument(
        "--max-tokens", type=int, default=64, help="tokens per prompt of greedy and seeded runs (default 64)"
    )
    p.add_argument("--samples", type=int, default=768, metavar="N", help="samples of each of six prompts (default 768)")
    p.add_argument("--temperature", type=float, help="of sampled runs (default 1; the packaged pair's is 0.8)")
    p.add_argument("--top-p", type=float, help="1 is off (default 1; the packaged pair's is 0.9)")
    p.add_argument("--top-k", type=int, default=0, help="0 is off")
    p.add_argument("--min-p", type=float, default=0.0, help="0 is off")
    p.add_argument("--seed", type=int, default=1, help="the first of the seeds; the whole check follows (default 1)")
    add_lengths(p)
    add_speculative_config(p)
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
    check_int("--samples", args.samples, 1)
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
    config, texts = speculative_config(args), _texts(args)
    llm = load("lychee check", args, target, draft, config, {"max_num_seqs": PER_REQUEST})
    subject = Subject(llm)
    prompts = tuple(llm.maker.sequences(text, sampling, 0)[0].prompt for text in texts)
    plan = Plan(prompts, sampling, args.samples)
    with tqdm(total=num_steps(plan), desc="checking", unit="step", leave=False, disable=None) as bar:
        results = prove(subject, plan, bar.update)
    seconds = time.perf_counter() - start
    if args.json:
        found = as_json(plan, results, asdict(config), seconds)
        args.json.write_text(json.dumps(found, ensure_ascii=False, indent=1), encoding="utf-8")
    Console().print(table(plan, results))
    for line in details(results, lambda token: llm.tokenizer.decode([token])):
        print(line)
    print(summary(results, not config.fallback_sampling, seconds))
    return 0 if results.lossless and results.powerful else 1


def _default(given: float | None, default: float) -> float:
    return default if given is None else given


def _texts(args: argparse.Namespace) -> list[str]:
    if args.prompt is not None:
        return [args.prompt]
    if args.prompt_file:
        return prompts_of_file(args.prompt_file)
    return [prompt for kind in demo.prompts().values() for prompt in kind]
