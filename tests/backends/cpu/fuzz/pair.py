"""Two workers, one compiling and one interpreting, and what it means that they agree."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from tests.backends.cpu.fuzz.kinds import KINDS
from tests.backends.cpu.fuzz.program import Buffer, Program
from tests.backends.cpu.fuzz.worker import read, write

ROOT = Path(__file__).parents[4]
PATIENCE = 120.0  # seconds for one program: it is not compiling, it is looping


@dataclass
class Worker:
    """A process that is started when needed, and again after a program has killed it."""

    mode: str
    threads: int = 1
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def send(self, program: Program) -> None:
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.backends.cpu.fuzz.worker", self.mode],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=dict(os.environ, OMP_NUM_THREADS=str(self.threads)),
                cwd=ROOT,
            )
        assert self.process.stdin
        write(self.process.stdin, program)

    def receive(self) -> tuple[list[bytes], str]:
        assert self.process
        assert self.process.stdout
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        answer: tuple[list[bytes], str] | None = read(self.process.stdout) if ready else None
        if answer is not None:
            return answer
        if not ready:
            self.process.kill()
        code = self.process.wait()
        self.process = None
        return [], f"the process died with code {code}" if ready else f"no answer within {PATIENCE} s"

    def close(self) -> None:
        if self.process and self.process.stdin:
            self.process.stdin.close()
            self.process.wait()
            self.process = None


@dataclass
class Pair:
    """A context manager that owns both workers; `check` raises AssertionError where they differ."""

    compiled: Worker = field(default_factory=lambda: Worker("compiled"))
    interpreted: Worker = field(default_factory=lambda: Worker("interpreted"))

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.compiled.close()
        self.interpreted.close()

    def check(self, program: Program) -> None:
        self.interpreted.send(program)
        self.compiled.send(program)
        want, wrong = self.interpreted.receive()
        got, failed = self.compiled.receive()
        assert not wrong, f"the interpreter cannot run this program, so it says nothing:\n{wrong}"
        assert not failed, f"compiled: {failed}"
        for number, (buffer, ours, theirs) in enumerate(zip(program.buffers, got, want, strict=True)):
            with named(f"buffer {number}"):
                compare(buffer, ours, theirs)


@contextmanager
def named(name: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from None


def compare(buffer: Buffer, got: bytes, want: bytes) -> None:
    """Integers and exact floats by value (-0 equals 0), rounded floats within the buffer's tolerance."""
    kind = KINDS[buffer.kind]
    ours, theirs = (_numbers(data, kind.torch) for data in (got, want))
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=buffer.tolerance, equal_nan=True)


def _numbers(data: bytes, dtype: torch.dtype) -> Tensor:
    """In a type that torch compares: unsigned ones as the signed one of their width, halves as float32."""
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
    return values.float() if dtype.is_floating_point else values.view(signed.get(dtype, dtype))
