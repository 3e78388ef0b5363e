"""`python -m lychee.run`: complete prompts with a model, or with a model and a draft, and say how fast it was."""

from __future__ import annotations

if __name__ == "__main__":  # as `lychee run`, before the imports that take long
    import sys

    from lychee.__main__ import main as lychee

    sys.exit(lychee(["run", *sys.argv[1:]]))

import argparse
import io
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from tqdm import tqdm

from . import demo, waiting  # noqa: F401  # waiting acts when it is imported, before torch
from .conversation import converse
from .options import (
    SPECULATION,
    Parser,
    add_lengths,
    add_loading,
    add_models,
    add_prefix_cache,
    add_prompts,
    add_room,
    add_speculative_config,
    check_writable,
    exit_code,
    load,
    speculative_config,
)
from .prompts import prompt_texts
from .report import Run, report, table
from .runtime.checks import ParameterError
from .runtime.llm import LLM
from .runtime.requests import Prompt
from .runtime.sampling_params import SamplingParams
from .runtime.sequence import Mode
from .sampling_options import add_sampling, sampling_params
from .terminal import Printer, print_comparison
from .timeline import Timeline
from .tuned import add_tuned, parsed

T = TypeVar("T")
SPECULATION_FLAGS = ("draft_model", *SPECULATION, "speculative_config")


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="lychee run", description=__doc__, allow_abbrev=False)
    add_models(p, without_draft="decoding is native")
    add_prompts(p, without_any="standard input, or the packaged pair's own")
    p.add_argument("--prompt-file-whole", action="store_true", help="the prompt file is one prompt")
    p.add_argument(
        "--chat",
        action="store_true",
        help="prompts are users' messages under the model's chat template; at a terminal, without any, converse",
    )
    p.add_argument("--system", metavar="TEXT", help="with --chat, the system's message, before the user's")
    add_sampling(p)
    add_lengths(p)
    add_speculative_config(p)
    add_tuned(p)
    p.add_argument("--native", action="store_true", help="decode without the draft model")
    p.add_argument(
        "--compare", action="store_true", help="native against speculative, alternated; implies --ignore-eos"
    )
    p.add_argument("--batch-size", type=int, metavar="N", help="prompts run together (default all; 1 with --compare)")
    add_room(p)
    p.add_argument("--max-num-seqs", type=int, metavar="N", help="prompts that run at once; others wait (default 64)")
    add_prefix_cache(p)
    p.add_argument("--report", type=Path, metavar="FILE.json", help="write outputs and metrics as JSON")
    p.add_argument(
        "--trace", type=Path, metavar="FILE.json", help="write when rounds and their phases ran, for Perfetto"
    )
    add_loading(p)
    return p


def main(argv: Seq[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows ? instead
    return exit_code("lychee run", lambda: _main(parsed(parser(), argv)))


def _main(args: argparse.Namespace) -> int:
    _check(args)
    packaged = args.model is None
    target = demo.TARGET if packaged else args.model
    conversing = _is_conversation(args)
    packaged_way = {"temperature": demo.TEMPERATURE, "top_p": demo.TOP_P, "seed": demo.SEED} if packaged else {}
    params = sampling_params(args, **{"max_tokens": 512 if conversing else 128, "temperature": 0.0, **packaged_way})
    draft = args.draft_model or (demo.DRAFT if packaged else None)
    if args.native and not args.compare:
        draft = None
    if args.compare and draft is None:
        raise ParameterError("--compare needs a --draft-model")
    config = None if draft is None else speculative_config(args)
    names = "max_model_len", "max_num_seqs", "num_blocks", "prefix_cache"
    named = {name: getattr(args, name) for name in names}
    sizes = {name: value for name, value in named.items() if value is not None}
    llm = load("lychee run", args, target, draft, config, sizes)
    prompts: list[Prompt] = []
    refused: dict[int, str] = {}
    if not conversing:
        texts = prompt_texts(args, packaged)
        prompts = [llm.encode_chat(messages(args, text)) for text in texts] if args.chat else [*texts]
        refused = refusals(llm, prompts, params)
        if len(refused) == len(prompts):
            return 2
    engines = (True, False) if args.compare else (draft is None,)
    _warm_up(llm, params, engines)
    timeline = Timeline()
    for native in engines if args.trace else ():
        timeline.watch(llm.engine(native), "native" if native else "speculative")
    identical: bool | None = None
    if conversing:
        llm.encode_chat(messages(args, ""))  # a model without a template says so before it asks
        runs = [converse(llm, params, input, args.system)]
    elif args.compare:
        left = [prompt for place, prompt in enumerate(prompts) if place not in refused]
        runs, identical = compare(llm, left, params, args.batch_size or 1)
    else:
        runs = [_stream(llm, prompts, refused, params, args.batch_size or len(prompts))]
    for run in runs:
        run.refused = refused
    if args.report:
        args.report.write_text(json.dumps(report(runs, identical), ensure_ascii=False, indent=1), encoding="utf-8")
    if args.trace:
        timeline.write(args.trace)
    if args.compare:
        print_comparison(runs, identical)
    else:
        Console(stderr=True).print(table(runs))
    return 130 if runs[0].interrupted else 2 if refused else 0


def messages(args: argparse.Namespace, text: str) -> list[Mapping[str, str]]:
    """A chat in which the user says `text`."""
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": text}]


def _is_conversation(args: argparse.Namespace) -> bool:
    """--chat at a terminal, with nothing to complete."""
    given = args.prompt is not None or args.prompt_file or args.compare
    return bool(args.chat and not given and sys.stdin is not None and sys.stdin.isatty())


def _warm_up(llm: LLM, params: SamplingParams, engines: Iterable[bool]) -> None:
    start = time.perf_counter()
    for native in engines:
        llm.warm_up(params, native=native)
    if (taken := time.perf_counter() - start) > 2:
        print(f"lychee run: warm-up took {taken:.1f} s; the first on a machine compiles the kernels", file=sys.stderr)


def _check(args: argparse.Namespace) -> None:
    """Refuse options that would be ignored."""
    if args.native and args.compare:
        raise ParameterError("--native and --compare exclude each other: --compare runs both")
    if args.native or (args.model and not args.draft_model):
        for name in SPECULATION_FLAGS:
            if getattr(args, name) is not None:
                why = "--native" if args.native else "no --draft-model"
                raise ParameterError(f"--{name.replace('_', '-')} has no use with {why}")
    if args.system is not None and not args.chat:
        raise ParameterError("--system needs --chat: other prompts are completed as they are")
    if args.prompt_file_whole and not args.prompt_file:
        raise ParameterError("--prompt-file-whole needs a --prompt-file")
    if args.batch_size is not None and args.batch_size < 1:
        raise ParameterError(f"--batch-size is {args.batch_size}, must be at least 1")
    if args.batch_size is not None and _is_conversation(args):
        raise ParameterError("--batch-size has no use in a conversation, which is of one answer at a time")
    check_writable("--report", args.report)
    check_writable("--trace", args.trace)


def refusals(llm: LLM, prompts: Seq[Prompt], params: SamplingParams) -> dict[int, str]:
    """Prompts that cannot be run, by place, and why; they are named on standard error. One alone raises instead."""
    refused: dict[int, str] = {}
    for place, prompt in enumerate(prompts):
        try:
            llm.check(prompt, params)
        except ParameterError as error:
            if len(prompts) == 1:
                raise
            refused[place] = str(error)
            print(f"lychee run: prompt {place + 1}: {error}", file=sys.stderr)
    return refused


def _batches(items: Seq[T], size: int) -> Iterator[Seq[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _stream(llm: LLM, prompts: Seq[Prompt], refused: Mapping[int, str], params: SamplingParams, batch_size: int) -> Run:
    """Complete the prompts but the refused ones, and print the text as it comes, each prompt's in turn."""
    run = Run("speculative" if llm.draft else "native")
    for places in _batches([place for place in range(len(prompts)) if place not in refused], batch_size):
        start = time.perf_counter()
        batch = [prompts[place] for place in places]
        stream = llm.stream(batch, params)
        printer = Printer(batch, [place + 1 for place in places] if len(prompts) > 1 else None)
        try:
            for chunk in stream:
                printer.show(chunk.request_id, chunk.text, chunk.finish_reason is not None)
        except KeyboardInterrupt:  # what was emitted so far is reported
            stream.close()
            run.interrupted = True
        run.wall_s += time.perf_counter() - start
        run.outputs += stream.outputs()
        if run.interrupted:
            print(flush=True)
            break
    run.metrics = llm.metrics()
    return run


def compare(llm: LLM, prompts: Seq[Prompt], params: SamplingParams, batch_size: int) -> tuple[list[Run], bool | None]:
    """Native and speculative runs of the same prompts, alternated; whether their tokens are identical.

    `identical` is None where speculation promises the distribution only (sampling that is not coupled).
    """
    runs = [Run("native"), Run("speculative")]
    batches = list(_batches(prompts, batch_size))
    for i, batch in enumerate(tqdm(batches, desc="comparing", unit="batch", leave=False, disable=None)):
        for run in runs if i % 2 == 0 else reversed(runs):
            start = time.perf_counter()
            run.outputs += llm.generate(batch, params, native=run.name == "native")
            run.wall_s += time.perf_counter() - start
    for run in runs:
        run.metrics = llm.metrics(run.name == "native")
    if llm.mode(params) is Mode.REJECTION:
        return runs, None
    return runs, all(a.token_ids == b.token_ids for a, b in zip(*(r.completions for r in runs), strict=True))
