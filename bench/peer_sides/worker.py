"""The process of one side: `python -m bench.peer_sides.worker`. It answers every JSON line with one.

The first line says what to load; the answer is {"about": ...}, or {"missing": ...} where a package cannot be imported.
What libraries print goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import asdict
from typing import IO, Any

from . import Answers, Setup


def answer(side: Answers, request: dict[str, Any]) -> dict[str, Any]:
    kind = request.pop("do")
    if kind == "generate":
        return asdict(side.generate(**request))
    if kind == "rows":
        context, repeats = request["context"], request["repeats"]
        passes = [[side.pass_ms(rows, context) for rows in request["sizes"]] for _ in range(repeats)]
        return {"ms": passes}
    if kind == "logits":
        return {"logits": side.logits_of(**request)}
    raise ValueError(f"cannot {kind}")


def serve(requests: IO[str], answers: IO[str]) -> None:
    def send(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    start = json.loads(requests.readline())
    module, _, name = start["make"].partition(":")
    try:
        made = getattr(importlib.import_module(module), name)
    except ImportError as error:
        return send({"missing": str(error)})
    side: Answers = made(Setup(**start["setup"]))
    send({"about": side.about})
    for line in requests:
        send(answer(side, json.loads(line)))
    return None


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
