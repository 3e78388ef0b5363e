"""Options that several commands have, and what is made of them."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, get_args

from . import interrupts
from .models.chat import ChatError
from .models.files import ModelError
from .runtime.checks import ParameterError
from .runtime.config import SpeculativeConfig, Verify
from .runtime.llm import DTYPES, LLM

SHAPES = ("max_draft_len", "num_speculative_tokens", "verify", "tree", "node_budget")
SPECULATION = ("draft_quant", *SHAPES)
"""Options that have no use without a draft model."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """A sentence, as for every other bad value."""
        raise ParameterError(message)


def add_models(p: argparse.ArgumentParser, without_draft: str, several: bool = False) -> None:
    """several: --draft-model may come more than once, and is a list."""
    p.add_argument(
        "model",
        nargs="?",
        help="a model directory, a GGUF file, or a name as for `lychee get`; without it, the packaged pair",
    )
    p.add_argument(
        "--draft-model",
        metavar="MODEL",
        action="append" if several else "store",
        help=f"the draft, as the model, or smollm2-draft; without it {without_draft}{'; repeatable' * several}",
    )


def add_prompts(p: argparse.ArgumentParser, without_any: str) -> None:
    source = p.add_mutually_exclusive_group()
    source.add_argument("--prompt", action="append", help=f"a prompt; may be repeated; without any, {without_any}")
    source.add_argument("--prompt-file", type=Path, metavar="FILE", help="prompts, one a line")


def given_prompts(args: argparse.Namespace, whole: bool = False) -> list[str]:
    """Of --prompt or --prompt-file, which is one prompt if `whole`; none where neither is given."""
    if args.prompt_file:
        return prompts_of_file(args.prompt_file, whole)
    return args.prompt or []


def add_lengths(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--max-draft-len", type=int, metavar="N", help="most tokens in a row drafted in a round (default 16)"
    )
    p.add_argument("--num-speculative-tokens", type=int, metavar="K", help="draft K tokens in every round")
    p.add_argument("--verify", choices=get_args(Verify), help="how drafts are accepted (default auto)")
    p.add_argument("--tree", metavar="TREE", help='auto (the default), chain, or children by depth, as in "4,2,2"')
    p.add_argument("--node-budget", type=int, metavar="N", help="most nodes of a tree (default 64, with auto 32)")


def add_speculative_config(p: argparse.ArgumentParser) -> None:
    p.add_argument("--speculative-config", metavar="JSON", help="fields of SpeculativeConfig as a JSON object")


def add_room(p: argparse.ArgumentParser) -> None:
    p.add_argument("--max-model-len", type=int, metavar="N", help="tokens a text may have (default: the model's limit)")
    p.add_argument("--num-blocks", type=int, metavar="N", help="KV blocks of 16 tokens (default: by free memory)")


def add_prefix_cache(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--no-prefix-cache",
        dest="prefix_cache",
        action="store_false",
        default=None,
        help="do not keep the KV of prompts and answers for requests that begin alike",
    )


def add_loading(p: argparse.ArgumentParser) -> None:
    p.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    p.add_argument(
        "--target-quant",
        metavar="FORMAT",
        help="quantise the model as it is read: int8, int8-g32, int4, int4-g64-sym, ...; none: a GGUF file's as floats",
    )
    p.add_argument("--draft-quant", metavar="FORMAT", help="the same for the draft model")
    p.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "int8"), help="default: the model's dtype")
    p.add_argument("--dtype", default="auto", choices=("auto", *DTYPES), help="default: float32 on the CPU")


def speculative_config(args: argparse.Namespace, tree: str = "auto") -> SpeculativeConfig:
    """Of these options. tree: what is drafted where they leave it open."""
    names = SHAPES
    flags = {name: getattr(args, name, None) for name in names}
    given = {name: value for name, value in flags.items() if value is not None}
    text = args.speculative_config or "{}"
    config = SpeculativeConfig.from_json(text, **given)
    is_open = config.tree == "auto" and not {"tree", "node_budget"} & {**json.loads(text), **given}.keys()
    return replace(config, tree=tree) if is_open else config


def load(
    command: str,
    args: argparse.Namespace,
    target: str | Path,
    draft: str | Path | None,
    config: SpeculativeConfig | None,
    sizes: dict[str, Any],
) -> LLM:
    """The LLM of these options; its notes go to standard error."""
    llm = LLM(
        target,
        draft,
        config,
        device=args.device,
        dtype=args.dtype,
        target_quant=args.target_quant,
        draft_quant=args.draft_quant,
        kv_cache_dtype=args.kv_cache_dtype,
        **sizes,
    )
    for note in llm.notes:
        print(f"{command}: {note}", file=sys.stderr)
    return llm


def prompts_of_file(file: Path, whole: bool = False) -> list[str]:
    """One a line, less blank lines; or one that is all of it."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ParameterError(f"--prompt-file {file} is not UTF-8: {error}") from error
    found = [text] if whole else [line for line in text.split("\n") if line.strip()]
    if not any(found):
        raise ParameterError(f"--prompt-file {file} holds no prompt")
    return found


def check_writable(option: str, file: Path | None) -> None:
    if file and not file.absolute().parent.is_dir():
        raise ParameterError(f"{option} is {file}, whose directory does not exist")
    if file and file.is_dir():
        raise ParameterError(f"{option} is {file}, which is a directory")


def exit_code(command: str, body: Callable[[], int]) -> int:
    """What `body` returns; 2 after a sentence on standard error where it was given what it cannot use.

    Warnings are sentences on standard error too.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda said, *_, **__: print(f"{command}: {said}", file=sys.stderr)
            return body()
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - what is still buffered has nowhere to go
        return 141
    except (ParameterError, ModelError, ChatError, ArithmeticError, OSError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return interrupts.say(command)
