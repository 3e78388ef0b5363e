"""The stepper: the one thread that works the engine. It steps while there is work; after a failure it begins anew."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from collections.abc import Sequence as Seq

from lychee.runtime.engine import Engine
from lychee.runtime.streamer import Chunk
from lychee.runtime.trial import Trial

from .job import EngineFailedError, Job, ServiceError, StoppedError

CHECK_DEADLINES_S = 0.02
Deliver = Callable[[Seq[tuple[Job, int, Chunk]], Seq[tuple[Job, ServiceError]]], None]


class Stepper:
    """make: the engine, when the thread starts; renew: another, after one failed. deliver: told what each step brought,
    on this thread. log: told what went wrong, for operators."""

    def __init__(
        self, make: Callable[[], Engine], renew: Callable[[], Engine], deliver: Deliver, log: Callable[[str], None]
    ) -> None:
        self.thread = threading.Thread(target=self._run, name="lychee-engine", daemon=True)
        self.engine: Engine | None = None
        self.trial = Trial()  # each engine's
        self.restarts = 0
        self.lost = False  # it failed and could not be made anew
        self.error: BaseException | None = None  # why the first engine could not be made
        self.ready = threading.Event()  # the engine is made, or could not be; not while it is made anew
        self._make, self._renew, self._deliver, self._log = make, renew, deliver, log
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open: dict[tuple[int, int], tuple[Job, int]] = {}  # by the chunks' ids: whose completion, and its number
        self._stopping = False
        self._checked = 0.0

    def add(self, job: Job) -> None:
        self._inbox.put(lambda: self._add(job))

    def abort(self, job: Job) -> None:
        """End the job's sequences; their blocks go back. Nothing more is delivered for it."""
        self._inbox.put(lambda: self._abort(job))

    def stop(self) -> None:
        """End the thread; what runs fails."""
        self._inbox.put(self._stop)

    def _run(self) -> None:
        try:
            self._begin(self._make())
        except Exception as error:
            self.error = error
        self.ready.set()
        while not self._stopping:
            if failure := self._once():  # the error itself is gone by now, and what its frames held of the engine
                self._restart(failure)
        self._give_up([(job, StoppedError("the service is shutting down")) for job in self._jobs()])
        if self.engine is not None:
            self.engine.trial = Trial()  # the engine may serve others

    def _begin(self, engine: Engine) -> None:
        engine.trial = self.trial
        self.engine = engine

    def _once(self) -> str:
        """What was asked for, and a step; the name of the error where one fails."""
        try:
            self._commands()
            self._expire()
            if self.engine is not None and not self.engine.idle:
                self._step(self.engine)
            return ""
        except Exception as error:
            self._log(f"the engine failed, and is restarted: {traceback.format_exc()}")
            return type(error).__name__

    def _commands(self) -> None:
        """Do what others asked for; wait for it where there is nothing else to do."""
        idle = self.engine is None or self.engine.idle
        try:
            while not self._stopping:
                self._inbox.get(block=idle)()
                idle = False
        except queue.Empty:
            pass

    def _step(self, engine: Engine) -> None:
        found = []
        for chunk in engine.step():
            key = chunk.request_id, chunk.sample_idx
            found.append((*self._open[key], chunk))
            if chunk.finish_reason is not None:
                del self._open[key]
        self._deliver(found, [])

    def _restart(self, failure: str) -> None:
        self.ready.clear()
        accelerated = self.engine is not None and self.engine.accelerated
        self.engine = None
        message = f"the engine failed ({failure}) and was restarted; the request may be sent again"
        self._fail_all(EngineFailedError(message, accelerated))
        try:
            self._begin(self._renew())
            self.restarts += 1
        except Exception:
            self.lost = True
            self._log(f"the engine could not be restarted: {traceback.format_exc()}")
        self.ready.set()

    def _add(self, job: Job) -> None:
        if self.engine is None:
            self._deliver([], [(job, EngineFailedError("the engine failed and could not be restarted"))])
            return
        for index, seq in enumerate(job.seqs):
            self._open[seq.request_id, seq.sample_idx] = job, index
            self.engine.add(seq)

    def _abort(self, job: Job) -> None:
        for seq in job.seqs:
            if self._open.pop((seq.request_id, seq.sample_idx), None) and self.engine is not None:
                self.engine.abort(seq)

    def _expire(self) -> None:
        now = time.perf_counter()
        if now - self._checked < CHECK_DEADLINES_S:
            return
        self._checked = now
        self._give_up([(job, error) for job in self._jobs() if (error := job.late(now))])

    def _give_up(self, found: list[tuple[Job, ServiceError]]) -> None:
        """End jobs before their time; what they hold of the engine goes back."""
        for job, _ in found:
            self._abort(job)
        if found:
            self._deliver([], found)

    def _fail_all(self, error: ServiceError) -> None:
        jobs = self._jobs()
        self._open.clear()
        self._deliver([], [(job, error) for job in jobs])

    def _jobs(self) -> set[Job]:
        return {job for job, _ in self._open.values()}

    def _stop(self) -> None:
        self._stopping = True
