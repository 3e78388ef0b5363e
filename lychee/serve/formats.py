"""Answers in the forms of OpenAI's API: what a completion, a chat and their streamed parts look like."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

from lychee.models.tokenizer import Tokenizer
from lychee.runtime.streamer import Chunk, TokenLogprob

Json = dict[str, Any]


class Format(Protocol):
    """One answer's form; it keeps what its streamed parts have to continue."""

    whole_object: str
    part_object: str
    id_prefix: str

    def whole(self, index: int, chunk: Chunk) -> Json:
        """A choice that is one chunk."""
        ...

    def part(self, index: int, chunk: Chunk) -> list[Json]:
        """Choices of the events that show the next chunk of a completion."""
        ...


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A special token's name, a token's text, or `bytes:` and what it has where that is not whole characters."""
    if token in tokenizer.special_ids:
        return tokenizer.token_string(token)
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@dataclass
class CompletionFormat:
    tokenizer: Tokenizer
    whole_object = part_object = "text_completion"
    id_prefix = "cmpl-"
    _offsets: dict[int, int] = field(default_factory=dict)

    def whole(self, index: int, chunk: Chunk) -> Json:
        return {
            "index": index,
            "text": chunk.text,
            "logprobs": None if chunk.logprobs is None else self._logprobs(index, chunk.logprobs),
            "finish_reason": chunk.finish_reason,
            "stop_reason": chunk.stop_reason,
        }

    def part(self, index: int, chunk: Chunk) -> list[Json]:
        shows = chunk.text or chunk.finish_reason or chunk.logprobs
        return [self.whole(index, chunk)] if shows else []

    def _logprobs(self, index: int, logprobs: Seq[TokenLogprob]) -> Json:
        """Of tokens whose texts are the same, the likeliest one stands in `top_logprobs`."""
        names = [token_text(self.tokenizer, p.token_id) for p in logprobs]
        offsets, at = [], self._offsets.get(index, 0)
        for p in logprobs:
            offsets.append(at)
            if p.token_id not in self.tokenizer.special_ids:  # characters that begin in the token
                at += sum(byte & 0xC0 != 0x80 for byte in self.tokenizer.token_bytes(p.token_id))
        self._offsets[index] = at
        tops: list[dict[str, float]] = []
        for p in logprobs:
            top: dict[str, float] = {}
            for token, logprob in p.top.items():  # likeliest first
                top.setdefault(token_text(self.tokenizer, token), logprob)
            tops.append(top)
        return {
            "tokens": names,
            "token_logprobs": [p.logprob for p in logprobs],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


@dataclass
class ChatFormat:
    tokenizer: Tokenizer
    whole_object, part_object = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    _begun: set[int] = field(default_factory=set)

    def whole(self, index: int, chunk: Chunk) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": chunk.text, "refusal": None},
            **self._rest(chunk),
        }

    def part(self, index: int, chunk: Chunk) -> list[Json]:
        choices = []
        if index not in self._begun:
            self._begun.add(index)
            delta = {"role": "assistant", "content": ""}
            choices.append({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
        if chunk.text or chunk.finish_reason or chunk.logprobs:
            delta = {"content": chunk.text} if chunk.text else {}
            choices.append({"index": index, "delta": delta, **self._rest(chunk)})
        return choices

    def _rest(self, chunk: Chunk) -> Json:
        return {
            "logprobs": None if chunk.logprobs is None else {"content": [*map(self._logprob, chunk.logprobs)]},
            "finish_reason": chunk.finish_reason,
            "stop_reason": chunk.stop_reason,
        }

    def _logprob(self, p: TokenLogprob) -> Json:
        return {**self._entry(p.token_id, p.logprob), "top_logprobs": [self._entry(t, v) for t, v in p.top.items()]}

    def _entry(self, token: int, logprob: float) -> Json:
        data = list(self.tokenizer.token_bytes(token))
        return {"token": token_text(self.tokenizer, token), "logprob": logprob, "bytes": data}


@dataclass(frozen=True)
class Envelope:
    """What all parts of one answer have in common."""

    form: Format
    answer_id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Seq[Json], usage: Json) -> Json:
        return {**self._head(self.form.whole_object), "choices": [*choices], "usage": usage}

    def event(self, choices: Seq[Json], usage: Json | None, with_usage: bool) -> Json:
        event = {**self._head(self.form.part_object), "choices": [*choices]}
        return {**event, "usage": usage} if with_usage else event

    def _head(self, kind: str) -> Json:
        return {
            "id": self.form.id_prefix + self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


def usage(prompt_tokens: int, completion_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
