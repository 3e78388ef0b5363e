"""Sampling parameters of a request, under vLLM's names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

from lychee.kernels.types import GREEDY_BELOW
from lychee.models.tokenizer import check_text

from .checks import ParameterError, check_bool, check_float, check_int, named_keywords, refuse


@named_keywords
@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    temperature: 0 (or below 1e-5) is greedy. top_k: 0 or -1 is off. top_p: 1 is off. min_p: 0 is off.
    seed: makes the output a function of the prompt and the seed alone, the same with and without speculation.
    stop: strings that end the text, themselves left out unless `include_stop_str_in_output`.
    logprobs: how many of the largest log-probabilities of the model's raw logits to return with each token.
    n: completions per prompt; they share the prompt's KV blocks.
    None stands for an empty `stop`, `stop_token_ids`, `bad_words` or `logit_bias`.
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = ()
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    max_new_tokens: InitVar[int | None] = None  # alias of max_tokens

    def __post_init__(self, max_new_tokens: int | None) -> None:
        if max_new_tokens is not None:
            if self.max_tokens not in (type(self).max_tokens, max_new_tokens):
                raise refuse("max_tokens", self.max_tokens, "left out where its alias max_new_tokens is given")
            self._set("max_tokens", check_int("max_new_tokens", max_new_tokens, 1))
        self._set("n", check_int("n", self.n, 1, 4096))
        self._set("max_tokens", check_int("max_tokens", self.max_tokens, 1))
        self._set("min_tokens", check_int("min_tokens", self.min_tokens, 0, self.max_tokens))
        self._set("temperature", check_float("temperature", self.temperature, 0.0, math.inf))
        self._set("top_p", check_float("top_p", self.top_p, 0.0, 1.0, above=True))
        self._set("top_k", check_int("top_k", self.top_k, -1))
        self._set("min_p", check_float("min_p", self.min_p, 0.0, 1.0))
        self._set("presence_penalty", check_float("presence_penalty", self.presence_penalty, -2.0, 2.0))
        self._set("frequency_penalty", check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        self._set("repetition_penalty", check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0))
        if self.seed is not None:
            self._set("seed", check_int("seed", self.seed, -(2**63), 2**63 - 1))
        if self.logprobs is not None:
            self._set("logprobs", check_int("logprobs", self.logprobs, 0, 1000))
        self._set("stop", _strings("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        self._set("bad_words", _strings("bad_words", self.bad_words))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._set("logit_bias", _biases(self.logit_bias))
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            check_bool(name, getattr(self, name))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


def _strings(name: str, values: object) -> tuple[str, ...]:
    values = () if values is None else values
    if isinstance(values, str) or not isinstance(values, Sequence) or not all(isinstance(v, str) and v for v in values):
        raise refuse(name, values, "a list of non-empty strings")
    for value in values:
        try:
            check_text(value, name)
        except ValueError as error:
            raise ParameterError(str(error)) from error
    return tuple(values)


def _token_ids(name: str, values: object) -> tuple[int, ...]:
    values = () if values is None else values
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise refuse(name, values, "a list of token ids")
    return tuple(check_int(name, i, 0) for i in values)


def _biases(values: object) -> dict[int, float]:
    """A bias is finite, or -inf to ban the token."""
    values = {} if values is None else values
    if not isinstance(values, Mapping):
        raise refuse("logit_bias", values, "a mapping of token ids to numbers")
    return {
        check_int("logit_bias id", token, 0): (
            -math.inf if bias == -math.inf else check_float("logit_bias value", bias, -1e4, 1e4)
        )
        for token, bias in values.items()
    }
