"""The asynchronous front of an engine: many callers stream from it at once; a thread of its own steps it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lychee.nouns import counted
from lychee.runtime.checks import check_float, check_int
from lychee.runtime.engine import Engine
from lychee.runtime.llm import LLM
from lychee.runtime.requests import Prompt
from lychee.runtime.sampling_params import SamplingParams
from lychee.runtime.sequence import Sequence
from lychee.runtime.streamer import Chunk
from lychee.runtime.trial import Trial

from .job import EngineFailedError, Job, QueueFullError, ServiceError, StoppedError
from .stepper import Stepper

Observe = Callable[[Job, int, Chunk], None]


@dataclass(frozen=True)
class QueueLimits:
    """max_queue: completions that may wait beside those that run together. queue_s, request_s: seconds until all
    completions of a request must have begun, and ended."""

    max_queue: int = 256
    queue_s: float = math.inf
    request_s: float = math.inf

    def __post_init__(self) -> None:
        check_int("max_queue", self.max_queue, 0)
        for name in ("queue_s", "request_s"):
            if not math.isinf(getattr(self, name)):
                check_float(name, getattr(self, name), 0.0, math.inf, above=True)


class AsyncEngine:
    """The engine of an LLM, which nothing else may use meanwhile. Methods belong to the event loop it was started on.

    A slow reader stalls nobody: its chunks are merged, and hold no more than its completions. A reader that goes away
    frees all that its request has. Where the engine fails, all that it was working on gets EngineFailedError, and a new
    one is made. observe: called with every chunk, its
    job and its completion's number, as it comes.
    """

    def __init__(
        self,
        llm: LLM,
        limits: QueueLimits | None = None,
        *,
        observe: Observe = lambda job, index, chunk: None,
        log: Callable[[str], None] = lambda message: print(f"lychee: {message}", file=sys.stderr),
    ) -> None:
        self.llm, self.limits, self.observe = llm, limits or QueueLimits(), observe
        self.draining = False
        self.open_sequences = 0  # admitted, or being read, and not ended
        self.jobs: set[Job] = set()  # not closed yet
        self._closed = asyncio.Event()
        self._encoders = ThreadPoolExecutor(2, "lychee-encoder")
        self._next_id = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stepper = Stepper(self._make, llm.renew_engine, self._deliver_threadsafe, log)

    def _make(self) -> Engine:
        self.llm.warm_up()
        return self.llm.engine()

    async def start(self) -> None:
        """Make and warm the engine. Raises what keeps it from being made."""
        self._loop = asyncio.get_running_loop()
        self._stepper.thread.start()
        await asyncio.to_thread(self._stepper.ready.wait)
        if self._stepper.error is not None:
            raise self._stepper.error

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, and wait until those that are open are closed; whether they all were in time."""
        self.draining = True
        until = time.perf_counter() + timeout_s
        while self.jobs and (left := until - time.perf_counter()) > 0:
            self._closed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closed.wait(), left)
        return not self.jobs

    async def stop(self) -> None:
        """End the thread. What is still open gets StoppedError."""
        self.draining = True
        self._stepper.stop()
        await asyncio.to_thread(self._stepper.thread.join)
        self._encoders.shutdown(wait=False)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculates: bool = True,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Chunks of a prompt's completions. Closing the generator, or cancelling its task, ends them.

        Raises ParameterError for what can never be answered, and ServiceError.
        """
        params = params or SamplingParams()
        job = self.submit(await self.prepare([prompt], params, speculates=speculates, cache_salt=cache_salt))
        try:
            while chunks := await job.mailbox.take():
                for chunk in chunks.values():
                    yield chunk
        finally:
            self.close(job)

    async def encode(self, prompt: str) -> list[int]:
        """A prompt's token ids. Raises ParameterError."""
        encode = self.llm.maker.encode
        return await asyncio.get_running_loop().run_in_executor(self._encoders, encode, prompt)

    async def prepare(
        self,
        prompts: Seq[Prompt],
        params: SamplingParams,
        *,
        speculates: bool = True,
        cache_salt: str | None = None,
    ) -> list[Sequence]:
        """The sequences of all completions of all prompts, encoded and checked. Raises as `stream`.

        Waits while a failed engine is made anew.
        """
        self._admit(len(prompts) * params.n)
        first, self._next_id = self._next_id, self._next_id + len(prompts) * params.n

        def make() -> list[Sequence]:
            ids = range(first, first + len(prompts) * params.n, params.n)
            sequences = self.llm.maker.sequences
            return [s for p, i in zip(prompts, ids, strict=True) for s in sequences(p, params, i, cache_salt)]

        seqs = await asyncio.get_running_loop().run_in_executor(self._encoders, make)
        if not self._stepper.ready.is_set():
            await asyncio.to_thread(self._stepper.ready.wait)
        engine = self.engine
        for seq in seqs:
            engine.check(seq)
            seq.speculates = speculates
        return seqs

    def submit(self, seqs: Seq[Sequence]) -> Job:
        """Begin what was prepared; its chunks come to the job's mailbox. The caller closes it. Raises ServiceError."""
        self._admit(len(seqs))
        now = time.perf_counter()
        job = Job(tuple(seqs), now + self.limits.queue_s, now + self.limits.request_s)
        self.open_sequences += len(seqs)
        self.jobs.add(job)
        self._stepper.add(job)
        return job

    def close(self, job: Job) -> None:
        """Nobody reads it any more: what is not finished ends. May be called again."""
        if job.unfinished:
            self._ended(job, set(job.unfinished))
            self._stepper.abort(job)
        self.jobs.discard(job)
        self._closed.set()

    @property
    def engine(self) -> Engine:
        """Raises EngineFailedError where there is none."""
        if self._stepper.engine is None:
            raise EngineFailedError("the engine failed, and could not be restarted")
        return self._stepper.engine

    @property
    def alive(self) -> bool:
        """The thread runs, and has an engine or is to have one."""
        return self._stepper.thread.is_alive() and not self._stepper.lost

    @property
    def ready(self) -> bool:
        """Requests are taken."""
        return self.alive and self._stepper.engine is not None and not self.draining

    @property
    def failing(self) -> bool:
        """There is no engine."""
        return self._stepper.engine is None

    @property
    def trial(self) -> Trial:
        """Of rounds with drafts and without, of whatever engine there is."""
        return self._stepper.trial

    @property
    def restarts(self) -> int:
        return self._stepper.restarts

    def _admit(self, count: int) -> None:
        if self.draining:
            raise StoppedError("the service is shutting down and takes no new requests")
        room = self.llm.sizes.max_num_seqs + self.limits.max_queue - self.open_sequences
        if count > room:
            raise QueueFullError(
                f"no room for {count} more now, beside {counted(self.open_sequences, 'open completion')}"
            )

    def _deliver_threadsafe(self, chunks: Seq[tuple[Job, int, Chunk]], errors: Seq[tuple[Job, ServiceError]]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(self._deliver, chunks, errors)

    def _deliver(self, chunks: Seq[tuple[Job, int, Chunk]], errors: Seq[tuple[Job, ServiceError]]) -> None:
        for job, index, chunk in chunks:
            if index in job.unfinished:  # else it was closed meanwhile
                self.observe(job, index, chunk)
                job.waiting.discard(index)
                job.mailbox.put(index, chunk)
                if chunk.finish_reason is not None:
                    self._ended(job, {index})
        for job, error in errors:
            if job.unfinished:
                self._ended(job, set(job.unfinished))
                job.mailbox.fail(error)

    def _ended(self, job: Job, completions: set[int]) -> None:
        job.unfinished -= completions
        job.waiting -= completions
        self.open_sequences -= len(completions)
