"""`python -m lychee.run`: complete prompts with a model, or with a model and a draft, and say how fast it was."""

from __future__ import annotations

import argparse
import io
import json
import select
import sys
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from rich.console import Console
from tqdm import tqdm

from . import demo, waiting  # noqa: F401  # waiting acts when it is imported, before torch
from .conversation import converse
from .get import resolve_model
from .options import (
    Parser,
    add_lengths,
    add_loading,
    add_models,
    add_room,
    add_speculative_config,
    check_writable,
    exit_code,
    load,
    prompts_of_file,
    speculative_config,
)
from .report import Run, report, table
from .runtime.llm import LLM
from .runtime.requests import Prompt
from .runtime.sampling_params import ParameterError, SamplingParams
from .runtime.sequence import Mode
from .terminal import Printer, print_comparison

SPECULATION_FLAGS = (
    "draft_model",
    "draft_quant",
    "max_draft_len",
    "num_speculative_tokens",
    "verify",
    "tree",
    "node_budget",
    "speculative_config",
)
STDIN_WAIT_S = 2.0


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="lychee run", description=__doc__, allow_abbrev=False)
    add_models(p, without_draft="decoding is native")
    source = p.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the prompt; without any, standard input, or the packaged pair's own")
    source.add_argument("--prompt-file", type=Path, metavar="FILE", help="prompts, one a line")
    p.add_argument("--prompt-file-whole", action="store_true", help="the prompt file is one prompt")
    p.add_argument(
        "--chat",
        action="store_true",
        help="prompts are users' messages under the model's chat template; at a terminal, without any, converse",
    )
    p.add_argument("--max-tokens", type=int, help="tokens to emit per prompt (default 128; 512 in a conversation)")
    p.add_argument("--temperature", type=float, help="0 is greedy (default 0; the packaged pair's is 0.7)")
    p.add_argument("--top-p", type=float, help="1 is off (default 1)")
    p.add_argument("--top-k", type=int, default=0, help="0 is off")
    p.add_argument("--min-p", type=float, default=0.0, help="0 is off")
    p.add_argument(
        "--seed",
        type=int,
        help="same seed, same text, with or without speculation (but not --verify rejection or traversal)",
    )
    p.add_argument("--ignore-eos", action="store_true", help="go on past the end of the text")
    add_lengths(p)
    add_speculative_config(p)
    p.add_argument("--native", action="store_true", help="decode without the draft model")
    p.add_argument(
        "--compare", action="store_true", help="native against speculative, alternated; implies --ignore-eos"
    )
    p.add_argument("--batch-size", type=int, metavar="N", help="prompts run together (default all; 1 with --compare)")
    add_room(p)
    p.add_argument("--max-num-seqs", type=int, metavar="N", help="prompts that run at once; others wait (default 64)")
    p.add_argument("--report", type=Path, metavar="FILE.json", help="write outputs and metrics as JSON")
    add_loading(p)
    return p


def main(argv: Seq[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows ? instead
    return exit_code("lychee run", lambda: _main(parser().parse_args(argv)))


def _main(args: argparse.Namespace) -> int:
    _check(args)
    packaged = args.model is None
    target = demo.TARGET if packaged else resolve_model(args.model)
    conversing = _is_conversation(args)
    params = SamplingParams(
        max_tokens=_default(args.max_tokens, 512 if conversing else 128),
        temperature=_default(args.temperature, demo.TEMPERATURE if packaged else 0.0),
        top_p=_default(args.top_p, demo.TOP_P if packaged else 1.0),
        top_k=args.top_k,
        min_p=args.min_p,
        seed=_default(args.seed, demo.SEED if packaged else None),
        ignore_eos=args.ignore_eos or args.compare,
    )
    draft = resolve_model(args.draft_model) if args.draft_model else demo.DRAFT if packaged else None
    if args.native and not args.compare:
        draft = None
    if args.compare and draft is None:
        raise ParameterError("--compare needs a --draft-model")
    config = None if draft is None else speculative_config(args)
    named = {name: getattr(args, name) for name in ("max_model_len", "max_num_seqs", "num_blocks")}
    sizes = {name: value for name, value in named.items() if value is not None}
    llm = load("lychee run", args, target, draft, config, sizes)
    _warm_up(llm, params, (True, False) if args.compare else (draft is None,))
    identical: bool | None = None
    if conversing:
        llm.encode_chat([{"role": "user", "content": ""}])  # a model without a template says so before it asks
        runs = [converse(llm, params, input)]
    else:
        texts = _prompts(args, packaged)
        prompts: list[Prompt] = (
            [llm.encode_chat([{"role": "user", "content": t}]) for t in texts] if args.chat else [*texts]
        )
        if args.compare:
            runs, identical = compare(llm, prompts, params, args.batch_size or 1)
        else:
            runs = [_stream(llm, prompts, params, args.batch_size or len(prompts))]
    if args.report:
        args.report.write_text(json.dumps(report(runs, identical), ensure_ascii=False, indent=1), encoding="utf-8")
    if args.compare:
        print_comparison(runs, identical)
    else:
        Console(stderr=True).print(table(runs))
    return 130 if runs[0].interrupted else 0


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
    if args.prompt_file_whole and not args.prompt_file:
        raise ParameterError("--prompt-file-whole needs a --prompt-file")
    if args.batch_size is not None and args.batch_size < 1:
        raise ParameterError(f"--batch-size is {args.batch_size}, must be at least 1")
    check_writable("--report", args.report)


def _default(given: Any, default: Any) -> Any:
    return default if given is None else given


def _prompts(args: argparse.Namespace, packaged: bool) -> list[str]:
    if args.prompt is not None:
        return [args.prompt]
    if args.prompt_file:
        return prompts_of_file(args.prompt_file, args.prompt_file_whole)
    if text := _read_stdin(wait=not packaged):
        return [text]
    if not packaged:
        raise ParameterError("no prompt: give --prompt, --prompt-file, or text on standard input")
    return [p for kind in demo.prompts().values() for p in kind] if args.compare else [demo.PROMPT]


def _read_stdin(wait: bool) -> str:
    """Standard input less its last newline, unless it is a terminal. Without `wait`, a silent one counts as empty."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    if not wait and not select.select([sys.stdin], [], [], STDIN_WAIT_S)[0]:
        print("lychee run: nothing on standard input, so the packaged prompt is used", file=sys.stderr)
        return ""
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ParameterError(f"standard input is not UTF-8: {error}") from error
    return text.replace("\r\n", "\n").removesuffix("\n")


def _batches(prompts: Seq[Prompt], size: int) -> Iterator[list[Prompt]]:
    for start in range(0, len(prompts), size):
        yield list(prompts[start : start + size])


def _stream(llm: LLM, prompts: Seq[Prompt], params: SamplingParams, batch_size: int) -> Run:
    """Complete the prompts and print the text as it comes, each prompt's in turn."""
    run = Run("speculative" if llm.draft else "native")
    for batch in _batches(prompts, batch_size):
        start = time.perf_counter()
        stream = llm.stream(batch, params)
        printer = Printer(len(prompts) > 1, len(run.outputs), batch)
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
    for i, batch in enumerate(tqdm(list(_batches(prompts, batch_size)), desc="comparing", unit="batch", leave=False)):
        for run in runs if i % 2 == 0 else reversed(runs):
            start = time.perf_counter()
            run.outputs += llm.generate(batch, params, native=run.name == "native")
            run.wall_s += time.perf_counter() - start
    for run in runs:
        run.metrics = llm.metrics(run.name == "native")
    if llm.mode(params) is Mode.REJECTION:
        return runs, None
    return runs, all(a.token_ids == b.token_ids for a, b in zip(*(r.completions for r in runs), strict=True))


if __name__ == "__main__":
    sys.exit(main())
