"""The options of `lychee tune`."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, get_args

from .. import demo
from ..models.files import ModelError
from ..options import (
    Parser,
    add_loading,
    add_models,
    add_prompts,
    add_room,
    check_writable,
    exit_code,
    given_prompts,
    load,
)
from ..run import messages
from ..runtime.alternate import fields_of
from ..runtime.checks import ParameterError, check_float, check_int
from ..runtime.config import SpeculativeConfig, Verify
from ..runtime.llm import DTYPES, LLM, device_of
from ..runtime.requests import Prompt
from ..runtime.sampling_params import SamplingParams
from ..sampling_options import add_sampling, sampling_params
from ..tuned import LOADING, Model, Tuned
from .candidates import Candidate, check_memory, misfit
from .found import Draft, Scenario, Unfit
from .ladder import Work, affordable, climb, config_of, confirm, natively
from .report import as_json, show
from .verdict import Verdict, decide

PACKAGED = 4  # prompts of each kind of the packaged ones
FILE = Path("tuned.json")


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="lychee tune", description=__doc__, allow_abbrev=False)
    add_models(p, without_draft="there is nothing to tune", several=True)
    add_prompts(p, without_any="and without a model, some of the packaged ones")
    p.add_argument("--chat", action="store_true", help="prompts are users' messages under the model's chat template")
    p.add_argument("--system", metavar="TEXT", help="with --chat, the system's message, before the user's")
    p.add_argument("--batch-size", type=int, default=1, metavar="N", help="prompts that run together (default 1)")
    p.add_argument("--runs", type=int, default=3, metavar="N", help="of all prompts, for each rung (default 3)")
    p.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="about, of measuring: else fewer prompts (default 60)"
    )
    p.add_argument("--verify", choices=get_args(Verify), default="auto", help="how drafts are accepted (default auto)")
    p.add_argument(
        "--json", type=Path, default=FILE, metavar="FILE.json", help=f"what `lychee run --tuned` reads (default {FILE})"
    )
    add_sampling(p)
    add_room(p)
    add_loading(p)
    return p


def main(argv: Seq[str] | None = None) -> int:
    return exit_code("lychee tune", lambda: _main(parser().parse_args(argv)))


def _main(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    texts = _checked(args)
    packaged = {} if args.model else {"temperature": demo.TEMPERATURE, "top_p": demo.TOP_P, "seed": demo.SEED}
    params = sampling_params(args, **{"max_tokens": 128, "temperature": 0.0, **packaged})
    device = device_of(args.device)
    dtype = DTYPES.get(args.dtype) or (DTYPES["float32"] if device.type == "cpu" else None)
    target = Candidate.of(args.model, demo.TARGET, "target", dtype, args.target_quant)
    named: list[str | None] = args.draft_model or [None]
    candidates = [Candidate.of(name, demo.DRAFT, "draft", dtype, args.draft_quant) for name in named]
    check_memory(target, device)
    work, scenario = _natively(args, target, texts, params)
    drafts = []
    for candidate in candidates:
        gc.collect()  # the pair before it is out of memory
        budget = args.seconds / len(candidates)
        unfit = misfit(target, candidate, device)
        drafts.append(
            Draft(candidate.name, candidate.parameters, unfit)
            if unfit
            else _measured(args, target, candidate, work, scenario, budget)
        )
    verdict = decide(scenario, drafts)
    tuned = _tuned(args, candidates, verdict)
    args.json.write_text(tuned.as_json(as_json(scenario, drafts, verdict)), encoding="utf-8")
    show(scenario, drafts, verdict)
    print(f"{args.json} is for `lychee run --tuned {args.json}`; {time.perf_counter() - start:.0f} s")
    return 0


def _checked(args: argparse.Namespace) -> list[str]:
    """The prompts. Raises ParameterError where an option is wrong."""
    check_int("--batch-size", args.batch_size, 1)
    check_int("--runs", args.runs, 1)
    check_float("--seconds", args.seconds, 0.0, float("inf"), above=True)
    check_writable("--json", args.json)
    if args.model and not args.draft_model:
        raise ParameterError("no --draft-model: there is nothing to tune")
    if args.system is not None and not args.chat:
        raise ParameterError("--system needs --chat: other prompts are completed as they are")
    if given := given_prompts(args):
        return given
    if args.model:
        raise ParameterError("no prompts: give --prompt-file or --prompt, as the verdict is about them")
    return [prompt for kind in demo.prompts().values() for prompt in kind[:PACKAGED]]


def _loaded(
    args: argparse.Namespace, target: Candidate, draft: Candidate | None, config: SpeculativeConfig | None
) -> LLM:
    room = {name: getattr(args, name) for name in ("max_model_len", "num_blocks") if getattr(args, name) is not None}
    given = argparse.Namespace(**{**vars(args), "draft_quant": args.draft_quant if draft else None})
    sizes = {"max_num_seqs": args.batch_size, "prefix_cache": False, **room}
    return load("lychee tune", given, target.path, None if draft is None else draft.path, config, sizes)


def _natively(
    args: argparse.Namespace, target: Candidate, texts: Seq[str], params: SamplingParams
) -> tuple[Work, Scenario]:
    """What is to be completed, and how it is without a draft; the last batch is filled up with the first prompts."""
    llm = _loaded(args, target, None, None)
    prompts: list[Prompt] = [llm.encode_chat(messages(args, text)) for text in texts] if args.chat else [*texts]
    for number, prompt in enumerate(prompts, 1):
        try:
            llm.check(prompt, params)
        except ParameterError as error:
            raise ParameterError(f"prompt {number}: {error}") from error
    size = args.batch_size
    filled = list(islice(cycle(prompts), -(-len(prompts) // size) * size))
    return natively(llm, [filled[at : at + size] for at in range(0, len(filled), size)], params, args.verify)


def _measured(
    args: argparse.Namespace, target: Candidate, candidate: Candidate, work: Work, scenario: Scenario, budget: float
) -> Draft:
    number = affordable(len(work.groups), scenario.seconds, args.runs, budget)
    some = work.first(number)
    if number < len(work.groups):
        print(
            f"lychee tune: {number} of {len(work.groups)} batches of prompts, for --seconds {args.seconds:g}",
            file=sys.stderr,
        )
    auto = config_of("auto", args.verify)
    try:
        draft = climb(_loaded(args, target, candidate, auto), some, args.runs, candidate.name)
    except (ParameterError, ModelError) as error:
        return Draft(candidate.name, candidate.parameters, Unfit("memory", f"{candidate.name}: {error}"))
    gc.collect()
    if draft.best is None or draft.best.gain.times <= 1:
        return draft
    again = _loaded(args, target, candidate, config_of(draft.best.policy, args.verify))
    return replace(draft, confirmed=confirm(again, some, args.runs, candidate.name))


def _tuned(args: argparse.Namespace, candidates: Seq[Candidate], verdict: Verdict) -> Tuned:
    default = parser()
    options = {name: getattr(args, name) for name in LOADING if getattr(args, name) != default.get_default(name)}
    model, config = Model.of(args.model, demo.TARGET), dict[str, Any]()
    if verdict.adopted is None or verdict.policy is None:
        options.pop("draft_quant", None)
        return Tuned(model, None, config, options, args.batch_size)
    config = {**fields_of(verdict.policy), "verify": args.verify}
    draft = Model.of(candidates[verdict.adopted].given, demo.DRAFT)
    return Tuned(model, draft, config, options, args.batch_size)
