"""The other end of a side's process, which is stopped while nothing is asked of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from lychee import waiting

from . import Generated, Setup, Side

ROOT = Path(__file__).parents[2]
LIBRARYS_SPINS = "300000"
"""libgomp's own GOMP_SPINCOUNT. Other programs than lychee do not set it, and are measured as they are used."""


class MissingError(Exception):
    """A package of the side cannot be imported."""


class SideError(Exception):
    """The side's process has ended."""


class Client:
    """A side that has loaded its model. Raises MissingError or SideError."""

    def __init__(self, side: Side, setup: Setup) -> None:
        self.side = side
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.peer_sides.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            env={**os.environ, **_waits(side), "OMP_NUM_THREADS": str(setup.threads)},
        )
        try:
            started = self._exchange({"make": side.make, "setup": asdict(setup)})
            if "missing" in started:
                raise MissingError(started["missing"])
        except BaseException:
            self.close()
            raise
        self.about: str = started["about"]
        self._signal(signal.SIGSTOP)

    def generate(self, prompt: list[int], max_tokens: int) -> Generated:
        return Generated(**self._ask(do="generate", prompt=prompt, max_tokens=max_tokens))

    def rows(self, sizes: list[int], context: int, repeats: int) -> list[list[float]]:
        """Milliseconds, for each repeat those of every size in turn."""
        found: list[list[float]] = self._ask(do="rows", sizes=sizes, context=context, repeats=repeats)["ms"]
        return found

    def logits_of(self, tokens: list[int], candidates: list[int]) -> list[float]:
        found: list[float] = self._ask(do="logits", tokens=tokens, candidates=candidates)["logits"]
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()
        self._errors.close()
        self._process.stdout.close()
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            return

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ask(self, **request: Any) -> dict[str, Any]:
        self._signal(signal.SIGCONT)
        answer = self._exchange(request)
        self._signal(signal.SIGSTOP)
        return answer

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise SideError(f"{self.side.name} has ended with status {self._process.wait()}: {said[-1]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)


def _waits(side: Side) -> dict[str, str]:
    """How the side's idle threads wait, unless the user says so for all of them."""
    return {} if side.is_lychee or waiting.GIVEN else {waiting.NAME: LIBRARYS_SPINS}
