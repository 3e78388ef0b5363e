"""The options of `lychee run` that are sampling parameters."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from .runtime.checks import ParameterError
from .runtime.sampling_params import SamplingParams

NUMBERS: Mapping[str, tuple[type, str]] = {
    "max_tokens": (int, "tokens to emit per prompt (default 128; 512 in a conversation)"),
    "min_tokens": (int, "tokens before the text may end (default 0)"),
    "temperature": (float, "0 is greedy (default 0; the packaged pair's is 0.7)"),
    "top_p": (float, "1 is off (default 1)"),
    "top_k": (int, "0 is off (default 0)"),
    "min_p": (float, "0 is off (default 0)"),
    "seed": (int, "same seed, same text, with or without speculation (but not --verify rejection or traversal)"),
    "repetition_penalty": (float, "above 1, tokens of the prompt and text become less likely (default 1)"),
    "presence_penalty": (float, "taken from the logits of tokens in the text (default 0)"),
    "frequency_penalty": (float, "taken as often as the token is in the text (default 0)"),
}

FILTERS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Fields that change nothing at temperature 0, and what they are off at."""


def add_sampling(p: argparse.ArgumentParser) -> None:
    """An option for each field of SamplingParams but `n` and `logprobs`, which have no place in a text."""
    for name, (kind, what) in NUMBERS.items():
        p.add_argument(_option(name), type=kind, metavar="N" if kind is int else "X", help=what)
    p.add_argument("--stop", action="append", metavar="TEXT", help="ends the text, which it is left out of; repeatable")
    p.add_argument(
        "--stop-token-id", dest="stop_token_ids", action="append", type=int, metavar="ID", help="the same of a token"
    )
    p.add_argument("--include-stop-str-in-output", action="store_true", help="the text has its --stop at the end")
    p.add_argument("--ignore-eos", action="store_true", help="go on past the end of the text")
    p.add_argument(
        "--logit-bias", action="append", metavar="ID=X", help="added to a token's logit; -inf bans it; repeatable"
    )
    p.add_argument("--bad-word", dest="bad_words", action="append", metavar="TEXT", help="never emitted; repeatable")
    p.add_argument(
        "--show-special-tokens",
        dest="skip_special_tokens",
        action="store_const",
        const=False,
        help="the text has control tokens too",
    )


def sampling_params(args: argparse.Namespace, **defaults: Any) -> SamplingParams:
    """`defaults` stand for options that are not given. Raises ParameterError."""
    lists = "stop", "stop_token_ids", "bad_words", "skip_special_tokens"
    given = {name: getattr(args, name) for name in (*NUMBERS, *lists) if getattr(args, name) is not None}
    if args.include_stop_str_in_output and not args.stop:
        raise ParameterError("--include-stop-str-in-output needs a --stop")
    params = SamplingParams(
        **{**defaults, **given},
        ignore_eos=args.ignore_eos or getattr(args, "compare", False),
        include_stop_str_in_output=args.include_stop_str_in_output,
        logit_bias=dict(map(_bias, args.logit_bias or ())),
    )
    for name, off in FILTERS.items():
        if params.greedy and given.get(name, off) != off:
            raise ParameterError(f"{_option(name)} has no use at --temperature {params.temperature:g}, which is greedy")
    return params


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ParameterError(f"--logit-bias is {text!r}, must be ID=X, a token id and a number") from None
