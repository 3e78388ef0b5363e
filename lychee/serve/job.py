"""A job: the completions of one call on their way through the engine, and the mailbox that its reader empties."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field, replace

from lychee.runtime.sequence import Sequence
from lychee.runtime.streamer import Chunk

from .channel import channel_name


class ServiceError(Exception):
    """A request that the service cannot answer, with a reason for its sender."""


class QueueFullError(ServiceError):
    """Too many requests are open."""


class QueueTimeoutError(ServiceError):
    """The request waited too long for its turn."""


class DeadlineError(ServiceError):
    """The request took longer than it may."""


class EngineFailedError(ServiceError):
    """The engine failed while it worked on the request, or cannot work any more.

    accelerated: in a round that may draft, for whichever request.
    """

    def __init__(self, message: str, accelerated: bool = False) -> None:
        super().__init__(message)
        self.accelerated = accelerated


class StoppedError(ServiceError):
    """The service is shutting down."""


class Mailbox:
    """Chunks for one reader, on the event loop's thread. What a slow reader leaves is merged, chunk by chunk of a
    completion, when it comes for it: it never holds more than the completions, and the engine never waits for it."""

    def __init__(self, num_completions: int) -> None:
        self._pending: dict[int, list[Chunk]] = {}
        self._unfinished = num_completions
        self._error: ServiceError | None = None
        self._changed = asyncio.Event()

    def put(self, index: int, chunk: Chunk) -> None:
        self._pending.setdefault(index, []).append(chunk)
        self._unfinished -= chunk.finish_reason is not None
        self._changed.set()

    def fail(self, error: ServiceError) -> None:
        self._error = self._error or error
        self._changed.set()

    async def take(self) -> dict[int, Chunk]:
        """What has come since the last time, one chunk for each completion that has any; empty after the end.

        Raises the error that ended the job, once all that came before it is read.
        """
        while not self._pending and self._unfinished and self._error is None:
            self._changed.clear()
            await self._changed.wait()
        pending, self._pending = self._pending, {}
        if not pending and self._error is not None:
            raise self._error
        return {index: merged(chunks) for index, chunks in pending.items()}


def merged(chunks: list[Chunk]) -> Chunk:
    """Consecutive chunks of one completion as one."""
    if len(chunks) == 1:
        return chunks[0]
    last = chunks[-1]
    return replace(
        last,
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        logprobs=None if last.logprobs is None else tuple(p for chunk in chunks for p in chunk.logprobs or ()),
    )


@dataclass(eq=False)
class Job:
    """The completions of one call; `seqs[i]` is number i.

    start_by, end_by: seconds of `time.perf_counter` by which every completion has begun, and ended. waiting:
    completions without a first chunk; unfinished: those that the engine still works on. Both are the event loop's own.
    """

    seqs: tuple[Sequence, ...]
    start_by: float = math.inf
    end_by: float = math.inf
    mailbox: Mailbox = field(init=False)
    waiting: set[int] = field(init=False)
    unfinished: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.mailbox = Mailbox(len(self.seqs))
        self.waiting, self.unfinished = set(range(len(self.seqs))), set(range(len(self.seqs)))

    @property
    def speculates(self) -> bool:
        return self.seqs[0].speculates

    @property
    def channel(self) -> str:
        return channel_name(self.speculates)

    def late(self, now: float) -> ServiceError | None:
        """Why the engine is to give it up, if it is."""
        if now > self.end_by:
            return DeadlineError("the request was not completed within the time it may take")
        if now > self.start_by and any(seq.stats.first_token is None for seq in self.seqs):
            return QueueTimeoutError("the request waited too long for its turn; try again later")
        return None
