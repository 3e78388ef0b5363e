"""A conversation at the terminal, turn by turn: `lychee run MODEL --chat` without a prompt."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from .nouns import counted
from .report import Run
from .runtime.checks import ParameterError
from .runtime.llm import LLM
from .runtime.sampling_params import SamplingParams

with suppress(ImportError):
    import readline  # noqa: F401  # gives `input` a history and editing keys

ASK = "> "
Messages = list[Mapping[str, str]]


def converse(llm: LLM, params: SamplingParams, read: Callable[[str], str], system: str | None = None) -> Run:
    """Answer what `read(ASK)` returns until it raises EOFError or is interrupted.

    The model sees the `system` message and all turns that fit.

    An interrupt while the model answers ends the answer alone.
    """
    run = Run("speculative" if llm.draft else "native")
    messages: Messages = [] if system is None else [{"role": "system", "content": system}]
    while True:
        try:
            text = read(ASK)
        except (EOFError, KeyboardInterrupt):
            print(flush=True)
            break
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        try:
            ids = _fitting(llm, messages, params.max_tokens)
            messages.append({"role": "assistant", "content": _answer(llm, ids, params, run)})
        except ParameterError as error:  # of this message alone: it goes on
            print(f"lychee run: {error}", file=sys.stderr)
            messages.pop()
    run.metrics = llm.metrics()
    return run


def _fitting(llm: LLM, messages: Messages, max_tokens: int) -> list[int]:
    """The conversation's token ids, without the oldest turns where an answer of `max_tokens` would not fit."""
    room = llm.max_model_len - max_tokens
    ids = llm.encode_chat(messages)
    first = int(messages[0]["role"] == "system")
    while len(ids) > room and len(messages) > first + 2:
        del messages[first : first + 2]
        print("lychee run: the oldest turn is left out, to fit the model's context", file=sys.stderr)
        ids = llm.encode_chat(messages)
    return ids


def _answer(llm: LLM, ids: list[int], params: SamplingParams, run: Run) -> str:
    """Print the answer as it comes, then its speed."""
    start = time.perf_counter()
    stream = llm.stream([ids], params)
    try:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
    except KeyboardInterrupt:
        stream.close()
    print(flush=True)
    taken = time.perf_counter() - start
    run.wall_s += taken
    run.outputs += stream.outputs()
    answer = run.outputs[-1].outputs[0]
    tokens = len(answer.token_ids)
    print(f"[{counted(tokens, 'token')}, {tokens / taken:.1f} tokens/s]", file=sys.stderr)
    return answer.text
