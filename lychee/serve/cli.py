"""`lychee serve`: answer over HTTP, as OpenAI's API does."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence as Seq
from pathlib import Path

from lychee import demo, waiting  # noqa: F401  # waiting acts when it is imported, before torch
from lychee.models.chat import ChatTemplate
from lychee.models.files import ModelError, read_text
from lychee.models.names import resolve_model
from lychee.options import (
    SPECULATION,
    Parser,
    add_lengths,
    add_loading,
    add_models,
    add_prefix_cache,
    add_speculative_config,
    exit_code,
    load,
    speculative_config,
)
from lychee.runtime.checks import ParameterError, check_float, check_int
from lychee.runtime.llm import LLM
from lychee.tuned import add_tuned, parsed

from .async_engine import QueueLimits
from .config import Margins, RateLimits, ServiceConfig
from .server import bound_socket, serve
from .service import Service

KEY_VARIABLE, ADMIN_VARIABLE = "LYCHEE_API_KEY", "LYCHEE_ADMIN_KEY"
MARGINS = ("goodput_margin", "error_margin")
CANARY = ("speculation_share", *MARGINS)


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="lychee serve", description=__doc__, allow_abbrev=False)
    add_models(p, without_draft="decoding is native")
    p.add_argument("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1: this machine alone)")
    p.add_argument("--port", type=int, default=8000, help="0 takes a free one (default 8000)")
    p.add_argument("--model-name", metavar="NAME", help="what clients call the model (default: its file's name)")
    p.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="a jinja file in place of the model's own template"
    )
    p.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"keys that clients need, one a line; or one in {KEY_VARIABLE}",
    )
    p.add_argument("--cors-origin", action="append", default=[], metavar="ORIGIN", help="web pages that may use it")
    p.add_argument("--requests-per-minute", type=int, metavar="N", help="for each key")
    p.add_argument("--tokens-per-minute", type=int, metavar="N", help="for each key: prompts, and max_tokens")
    p.add_argument("--concurrency", type=int, metavar="N", help="requests at a time, for each key")
    p.add_argument("--max-queue", type=int, default=256, metavar="N", help="completions that wait (default 256)")
    p.add_argument(
        "--queue-timeout", type=float, metavar="S", help="seconds that a request may wait (default: no limit)"
    )
    p.add_argument("--request-timeout", type=float, metavar="S", help="seconds that it may take (default: no limit)")
    p.add_argument(
        "--stall-timeout", type=float, default=60.0, metavar="S", help="until a client that reads nothing is cut off"
    )
    p.add_argument(
        "--drain-timeout", type=float, default=30.0, metavar="S", help="that open requests have after SIGTERM"
    )
    p.add_argument("--max-body", type=int, default=1 << 20, metavar="BYTES", help="of a request (default 1 MiB)")
    p.add_argument("--max-completions", type=int, default=16, metavar="N", help="of a request (default 16)")
    p.add_argument("--max-logprobs", type=int, default=20, metavar="N", help="for a token (default 20)")
    p.add_argument("--max-stops", type=int, default=16, metavar="N", help="stop strings of a request (default 16)")
    p.add_argument("--max-connections", type=int, default=1024, metavar="N", help="open at a time (default 1024)")
    p.add_argument(
        "--speculation-share",
        type=float,
        metavar="S",
        help=f"of users that are drafted for, 0 to 1 (default 1); /admin/speculation changes it, with {ADMIN_VARIABLE}",
    )
    p.add_argument(
        "--goodput-margin",
        type=float,
        metavar="S",
        help="a share between 0 and 1 is taken back where drafting makes tokens per second so much fewer "
        "(default 0.1; 1 never does)",
    )
    p.add_argument(
        "--error-margin",
        type=float,
        metavar="S",
        help="and where so much more of the requests that are drafted for fail (default 0.05; 1 never does)",
    )
    p.add_argument("--log-prompts", action="store_true", help="the log shows prompts")
    p.add_argument("--max-model-len", type=int, metavar="N", help="tokens a text may have (default: the model's limit)")
    p.add_argument("--max-num-seqs", type=int, metavar="N", help="completions that run at once (default 64)")
    p.add_argument("--num-blocks", type=int, metavar="N", help="KV blocks of 16 tokens (default: by free memory)")
    p.add_argument(
        "--prefill-budget",
        type=int,
        default=128,
        metavar="N",
        help="prompt tokens that are read between two rounds, up to 512: less lets streams wait less (default 128)",
    )
    add_prefix_cache(p)
    add_lengths(p)
    add_speculative_config(p)
    add_tuned(p)
    add_loading(p)
    return p


def main(argv: Seq[str] | None = None) -> int:
    return exit_code("lychee serve", lambda: _main(parsed(parser(), argv)))


def _main(args: argparse.Namespace) -> int:
    limits = QueueLimits(
        check_int("--max-queue", args.max_queue, 0),
        _seconds("--queue-timeout", args.queue_timeout),
        _seconds("--request-timeout", args.request_timeout),
    )
    packaged = args.model is None
    target = demo.TARGET if packaged else resolve_model(args.model)
    config = _config(args, "lychee-demo" if packaged else target.name)
    check_int("--port", args.port, 0, 65535)
    check_int("--max-connections", args.max_connections, 1)
    listener = bound_socket(args.host, args.port)
    llm = _llm(args, packaged, target)
    service = Service(llm, config, limits, _chat(args, target, llm))
    host, port = listener.getsockname()[:2]
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    serve(service, listener, args.max_connections, lambda: print(f"{config.model_name} at {where}/v1", flush=True))
    return 0


def _config(args: argparse.Namespace, name: str) -> ServiceConfig:
    for flag in ("requests_per_minute", "tokens_per_minute", "concurrency"):
        if getattr(args, flag) is not None:
            check_int(f"--{flag.replace('_', '-')}", getattr(args, flag), 1)
    for flag in ("max_body", "max_completions", "max_stops"):
        check_int(f"--{flag.replace('_', '-')}", getattr(args, flag), 1)
    margins = Margins()
    check_int("--max-logprobs", args.max_logprobs, 0, 1000)
    return ServiceConfig(
        model_name=args.model_name or name,
        api_keys=_keys(args.api_key_file),
        admin_key=os.environ.get(ADMIN_VARIABLE) or None,
        rates=RateLimits(args.requests_per_minute, args.tokens_per_minute, args.concurrency),
        max_body_bytes=args.max_body,
        max_completions=args.max_completions,
        max_logprobs=args.max_logprobs,
        max_stops=args.max_stops,
        stall_s=check_float("--stall-timeout", args.stall_timeout, 0.0, math.inf, above=True),
        drain_s=check_float("--drain-timeout", args.drain_timeout, 0.0, math.inf),
        speculation_share=_share("--speculation-share", args.speculation_share, 1.0),
        margins=Margins(
            _share("--goodput-margin", args.goodput_margin, margins.goodput),
            _share("--error-margin", args.error_margin, margins.errors),
        ),
        cors_origins=tuple(args.cors_origin),
        log_prompts=args.log_prompts,
    )


def _keys(file: Path | None) -> tuple[str, ...]:
    """Those of the file and of the environment. An empty file is refused: it would open the service to everyone."""
    given = [line.strip() for line in read_text(file, 1 << 20).splitlines()] if file else []
    keys = [key for key in (*given, os.environ.get(KEY_VARIABLE, "")) if key]
    if file and not keys:
        raise ParameterError(f"--api-key-file {file} holds no key")
    if bad := next((key for key in keys if not key.isascii() or not key.isprintable() or " " in key), None):
        raise ParameterError(f"an API key of {len(bad)} characters has others than printable ASCII ones")
    return tuple(keys)


def _llm(args: argparse.Namespace, packaged: bool, target: Path) -> LLM:
    draft = resolve_model(args.draft_model) if args.draft_model else demo.DRAFT if packaged else None
    if args.native:  # as --tuned says
        draft = None
    config = None
    if draft is None:
        _refuse_given(args, (*SPECULATION, "speculative_config", *CANARY), "no --draft-model")
    else:
        config = speculative_config(args)
        if config.max_draft_len == 0:
            _refuse_given(args, CANARY, "max_draft_len 0, where nothing is drafted")
        if args.speculation_share in (None, 0.0, 1.0) and not os.environ.get(ADMIN_VARIABLE):
            _refuse_given(args, MARGINS, f"a --speculation-share of 0 or 1 that no {ADMIN_VARIABLE} may change")
    names = "max_model_len", "max_num_seqs", "num_blocks", "prefill_budget", "prefix_cache"
    named = {name: getattr(args, name) for name in names}
    sizes = {name: value for name, value in named.items() if value is not None}
    llm = load("lychee serve", args, target, draft, config, sizes)
    llm.engine()  # what it cannot have is said before anything listens
    return llm


def _refuse_given(args: argparse.Namespace, names: Seq[str], why: str) -> None:
    """Refuse options that would be ignored."""
    for name in names:
        if getattr(args, name) is not None:
            raise ParameterError(f"--{name.replace('_', '-')} has no use with {why}")


def _chat(args: argparse.Namespace, target: Path, llm: LLM) -> ChatTemplate | None:
    if args.chat_template:
        return ChatTemplate(read_text(args.chat_template, 1 << 18), llm.tokenizer)
    try:
        return ChatTemplate.load(target, llm.tokenizer)
    except ModelError:
        return None


def _share(flag: str, given: float | None, default: float) -> float:
    return default if given is None else check_float(flag, given, 0.0, 1.0)


def _seconds(flag: str, given: float | None) -> float:
    return math.inf if given is None else check_float(flag, given, 0.0, math.inf, above=True)
