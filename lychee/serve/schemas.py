"""Bodies of requests. A field that is unknown, or asks for what is not supported, is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from lychee.runtime.sampling_params import SamplingParams

from .config import ServiceConfig
from .errors import bad

# Fields of OpenAI's API that are not supported, with the values that ask for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "suffix": (None,),
    "echo": (None, False),
    "best_of": (None, 1),
    "functions": (None, []),
    "function_call": (None, "none"),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "response_format": (None, {"type": "text"}),
    "store": (None, False),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "service_tier": (None, "auto", "default"),
}
SAMPLING = (  # given on to SamplingParams as they are; null is the default
    "n",
    "temperature",
    "top_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "bad_words",
    "skip_special_tokens",
    "include_stop_str_in_output",
)


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Body):
    include_usage: bool = False


class Generation(Body):
    """What completions and chats share. `speculative` overrides the server's choice for this request."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    speculative: bool | None = None
    cache_salt: str | None = None

    def sampling(self, config: ServiceConfig, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Raises ApiError or ParameterError."""
        if logprobs is not None and logprobs > config.max_logprobs:
            raise bad("logprobs", f"logprobs is {logprobs}, must be at most {config.max_logprobs}")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        for name, strings in (("stop", stops), ("bad_words", self.bad_words)):
            if len(strings or ()) > config.max_stops or any(len(s) > config.max_stop_chars for s in strings or ()):
                limit = f"{config.max_stops} strings of at most {config.max_stop_chars} characters"
                raise bad(name, f"{name} may have at most {limit}")
        for name, many in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            if len(many or ()) > 64 * config.max_stops:
                raise bad(name, f"{name} has {len(many or ())} entries, may have at most {64 * config.max_stops}")
        given: dict[str, Any] = {name: getattr(self, name) for name in SAMPLING}
        given |= {"max_tokens": max_tokens, "logprobs": logprobs, "logit_bias": biases(self.logit_bias)}
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(Generation):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None


class TextPart(Body):
    type: str
    text: str


class Message(Body):
    role: str
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(Generation):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TokenizeBody(Body):
    """`prompt`, or `messages` under the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None


class SpeculationBody(Body):
    """share: of users, or of requests without one, that are drafted for."""

    share: float


Kind = TypeVar("Kind", bound=Body)


def parse(kind: type[Kind], body: bytes) -> Kind:
    """Raises ApiError, which names the field."""
    try:
        given = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise bad(None, f"the body is not JSON: {error}", "invalid_json") from None
    if not isinstance(given, dict):
        raise bad(None, f"the body is a JSON {type(given).__name__}, must be an object", "invalid_json")
    for name in given.keys() & NEUTRAL.keys() - kind.model_fields.keys():
        if not any(type(given[name]) is type(value) and given[name] == value for value in NEUTRAL[name]):
            raise bad(name, f"{name} asks for what this server does not support; leave it out", "unsupported_parameter")
    try:
        return kind.model_validate({name: v for name, v in given.items() if name not in NEUTRAL})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = _param(first["loc"], given)
        if first["type"] == "extra_forbidden":
            raise bad(param, f"{param} is not a field of this request", "unknown_parameter") from None
        raise bad(param, f"{param}: {first['msg']}") from None


def biases(given: Mapping[str, float] | None) -> dict[int, float] | None:
    """JSON has strings for keys."""
    for token in given or ():
        if not (token.isascii() and token.isdigit() and len(token) <= 9):
            raise bad("logit_bias", f"logit_bias has the key {token!r}, must have token ids")
    return None if given is None else {int(token): bias for token, bias in given.items()}


def _param(loc: tuple[int | str, ...], given: Any) -> str:
    """As much of pydantic's path as leads through what was sent, less the names it gives to a union's members."""
    path = ""
    for part in loc:
        if isinstance(given, list) and isinstance(part, int) and part < len(given):
            path, given = f"{path}[{part}]", given[part]
        elif isinstance(given, dict) and (part in given or not path or part in ("role", "content", "type", "text")):
            path, given = f"{path}.{part}" if path else str(part), given.get(part)
    return path


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
