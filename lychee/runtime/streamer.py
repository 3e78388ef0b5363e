"""The streamer: turns accepted tokens into text deltas, and finds where a sequence ends."""

from __future__ import annotations

from dataclasses import dataclass

from .sequence import Sequence


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of an emitted token under the model's raw logits, and of the most likely ones, by token id."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True)
class Chunk:
    """What one step added to a sequence. Joined `text`s are the completion; `finish_reason` is set on the last."""

    request_id: int
    sample_idx: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: str | None
    stop_reason: int | str | None


def push(seq: Sequence, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] | None) -> Chunk:
    """Append accepted tokens until the sequence ends; what follows the end is dropped."""
    shown, added = "", 0
    for token in tokens:
        seq.tokens.append(token)
        added += 1
        shown += _append(seq, token)
        if seq.finished:
            break
    seq.text += shown
    kept = None if logprobs is None else logprobs[:added]
    return Chunk(seq.request_id, seq.sample_idx, shown, tokens[:added], kept, seq.finish_reason, seq.stop_reason)


def _append(seq: Sequence, token: int) -> str:
    """Text that the last token makes visible; ends the sequence where it should."""
    params, may_stop = seq.params, seq.num_emitted >= seq.params.min_tokens
    if token in seq.end_ids and may_stop:
        seq.finish_reason = "stop"
        seq.stop_reason = token if token in (params.stop_token_ids or ()) else None
        return _release(seq, seq.detokenizer.flush())
    pending = seq.held + seq.detokenizer.push(token)
    if may_stop and (cut := _find_stop(pending, tuple(params.stop or ()))):
        start, stop = cut
        seq.finish_reason, seq.stop_reason, seq.held = "stop", stop, ""
        return pending[: start + len(stop)] if params.include_stop_str_in_output else pending[:start]
    if len(seq.tokens) >= seq.limit:
        seq.finish_reason, seq.held = "length", pending
        return _release(seq, seq.detokenizer.flush())
    keep = _may_begin_stop(pending, tuple(params.stop or ()))
    seq.held = pending[len(pending) - keep :]
    return pending[: len(pending) - keep]


def _release(seq: Sequence, tail: str) -> str:
    text, seq.held = seq.held + tail, ""
    return text


def _find_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """The earliest stop string in the text; of several starting there, the first given."""
    found = [(at, i) for i, stop in enumerate(stops) if (at := text.find(stop)) >= 0]
    if not found:
        return None
    at, i = min(found)
    return at, stops[i]


def _may_begin_stop(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of the text that begins a stop string."""
    longest = min(len(text), max((len(s) for s in stops), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in stops)), 0)
