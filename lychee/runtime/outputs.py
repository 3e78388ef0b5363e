"""What a caller gets: a stream of chunks, and the completions they make up."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from .metrics import RequestStats
from .sequence import Sequence
from .streamer import Chunk, TokenLogprob


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt. stats: what it took; see RequestStats."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None  # stop, length or abort; None while it goes on
    stop_reason: int | str | None
    logprobs: tuple[TokenLogprob, ...] | None
    stats: RequestStats


@dataclass(frozen=True)
class RequestOutput:
    """A prompt with its completions, in the order of `index`.

    lossy: made with `fallback_sampling=False`, so not distributed as the target alone would have it.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    lossy: bool = False


@dataclass(frozen=True)
class Request:
    prompt: str | None
    seqs: tuple[Sequence, ...]
    lossy: bool

    @property
    def request_id(self) -> int:
        return self.seqs[0].request_id


class Stream:
    """Chunks of some requests; `chunk.request_id` counts their prompts from 0. Closing it ends them."""

    def __init__(self, requests: Seq[Request], chunks: Generator[Chunk, None, None]) -> None:
        self._requests, self._chunks = requests, chunks
        self._index = {request.request_id: i for i, request in enumerate(requests)}
        self._logprobs: dict[tuple[int, int], list[TokenLogprob]] = {}

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        chunk = next(self._chunks)
        index = self._index[chunk.request_id]
        self._logprobs.setdefault((index, chunk.sample_idx), []).extend(chunk.logprobs or ())
        return replace(chunk, request_id=index)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the requests that go on, those that have not started too."""
        self._chunks.close()
        for request in self._requests:
            for seq in request.seqs:
                seq.finish_reason = seq.finish_reason or "abort"

    def outputs(self) -> list[RequestOutput]:
        """The completions so far, one RequestOutput per prompt."""
        return [
            RequestOutput(
                prompt=request.prompt,
                prompt_token_ids=request.seqs[0].prompt,
                outputs=tuple(self._completion(i, seq) for seq in request.seqs),
                lossy=request.lossy,
            )
            for i, request in enumerate(self._requests)
        ]

    def _completion(self, index: int, seq: Sequence) -> CompletionOutput:
        logprobs = self._logprobs.get((index, seq.sample_idx), [])
        return CompletionOutput(
            index=seq.sample_idx,
            text=seq.text,
            token_ids=tuple(seq.emitted),
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            logprobs=None if seq.params.logprobs is None else tuple(logprobs),
            stats=seq.stats,
        )
