"""A process that runs generated programs: `python -m tests.backends.cpu.fuzz.worker compiled|interpreted`

Reads pickled programs from standard input, each after its length in eight bytes, and answers on standard output in
the same way: (the buffers afterwards as lists of bytes, "") or ([], what went wrong).
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import os
import pickle
import struct
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any, BinaryIO

MODE = sys.argv[1] if __name__ == "__main__" else ""
if MODE == "interpreted":
    os.environ["TRITON_INTERPRET"] = "1"
else:
    os.environ.pop("TRITON_INTERPRET", None)

import torch  # noqa: E402

from tests.backends.cpu.fuzz.program import Pointer, Program  # noqa: E402


def load(source: str, folder: Path, number: int) -> Any:
    """The `kernel` of a module that is a real file, as Triton reads source by file and line."""
    path = folder / f"program_{number}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


def run(program: Program, kernel: Any) -> list[bytes]:
    """Launches once; the bytes of every buffer afterwards."""
    memory = [buffer.make() for buffer in program.buffers]
    arguments = [memory[a.buffer].tensor[a.offset :] if isinstance(a, Pointer) else a for a in program.arguments]
    kernel[program.grid](*arguments, **dict(program.constants))
    for number, region in enumerate(memory):
        if not region.intact():
            raise RuntimeError(f"memory beside buffer {number} was written")
    return [region.tensor.view(torch.uint8).numpy().tobytes() for region in memory]


def read(stream: BinaryIO) -> Any:
    """The next message, or None at the end."""
    head = stream.read(8)
    return pickle.loads(stream.read(struct.unpack("<Q", head)[0])) if len(head) == 8 else None


def write(stream: BinaryIO, message: Any) -> None:
    data = pickle.dumps(message)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def main() -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    warnings.simplefilter("ignore")
    faulthandler.enable()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a program prints must not mix with the answers
    scope: Any = contextlib.nullcontext()
    if MODE == "interpreted":
        from tests.backends.cpu.fuzz.mended import mend

        mend()
    else:
        from lychee.backends.cpu import activated

        scope = activated()
    with tempfile.TemporaryDirectory() as folder, scope:
        number = 0
        while (program := read(sys.stdin.buffer)) is not None:
            number += 1
            try:
                answer = run(program, load(program.source, Path(folder), number)), ""
            except Exception:
                answer = [], traceback.format_exc()
            write(answers, answer)


if __name__ == "__main__":
    main()
