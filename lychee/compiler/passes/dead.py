"""Dead code: calls of which nothing is seen."""

from __future__ import annotations

from dataclasses import replace

from ..program import Program
from .effects import mutates


def without_dead_calls(program: Program) -> Program:
    """The program without calls that write nothing in place and of whose outputs none is read, nor a result."""
    needed = {value.root for value in program.results}
    kept = []
    for call in reversed(program.calls):
        if mutates(call) or any(value in needed for value in call.outputs):
            kept.append(call)
            needed.update(value.root for value in call.reads)
    return replace(program, calls=tuple(reversed(kept)))
