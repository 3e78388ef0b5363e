"""When each round and each phase of it ran, as a file that Perfetto (ui.perfetto.dev) and Chrome's tracing open."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .runtime.drafter import ModelDrafter
from .runtime.engine import Engine

Event = dict[str, Any]


class Timeline:
    """Events of the engines that it watches, each engine a row of its own."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._start = time.perf_counter()

    def watch(self, engine: Engine, name: str) -> None:
        """From now on record the engine's steps: a `round` or a `prefill`, and within it the phases and passes.

        Phases: plan, draft and verify; the rest of a round commits and streams. Passes of a model that run within a
        phase have their number of rows; a draft loop, replayed as one, has none.
        """
        row = 1 + sum(event["ph"] == "M" for event in self.events)
        self.events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": row, "args": {"name": name}})
        step = engine.step

        def watched() -> Any:
            before = len(self.events)
            with self._event("prefill", row) as event:
                chunks = step()
                phases = {found["name"] for found in self.events[before:]}
                if "verify" in phases:
                    event["name"] = "round"
                event["args"] = {"sequences": len(chunks), "emitted": sum(len(chunk.token_ids) for chunk in chunks)}
            return chunks

        vars(engine)["step"] = watched
        self._wrap(engine.controller, "plan", "plan", row, lambda ids: {"sequences": len(ids)})
        self._wrap(engine.verifier, "run", "verify", row, lambda rows, *_: {"rows": len(rows.tokens)})
        self._wrap(engine.target, "forward", "target pass", row, lambda rows: {"rows": len(rows.tokens)})
        drafter = engine.drafter
        if drafter is not None:
            self._wrap(
                drafter, "propose", "draft", row, lambda _, shapes, *__: {"nodes": sum(s.num_nodes for s in shapes)}
            )
        if isinstance(drafter, ModelDrafter):
            self._wrap(drafter.loop, "run", "draft loop", row, lambda *_: {})
            self._wrap(drafter.compiled, "forward", "draft pass", row, lambda rows: {"rows": len(rows.tokens)})

    def write(self, file: Path) -> None:
        """One JSON object of the Trace Event Format; times are microseconds since the timeline was made."""
        events = [event for event in self.events if event["ph"] == "M" or event["dur"] > 0]
        file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n", encoding="utf-8")

    def _wrap(self, owner: object, method: str, name: str, row: int, args: Callable[..., dict[str, int]]) -> None:
        run = getattr(owner, method)

        def watched(*given: Any) -> Any:
            with self._event(name, row) as event:
                event["args"] = args(*given)
                return run(*given)

        vars(owner)[method] = watched

    @contextmanager
    def _event(self, name: str, row: int) -> Iterator[Event]:
        start = time.perf_counter()
        event: Event = {"name": name, "ph": "X", "ts": 1e6 * (start - self._start), "dur": 0.0, "pid": 1, "tid": row}
        self.events.append(event)
        yield event
        event["dur"] = 1e6 * (time.perf_counter() - start)
