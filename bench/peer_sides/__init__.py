"""The sides of `bench.peers`: ways to complete a prompt, each in a process of its own.

A side's `make` names a class that is called with a Setup; its methods are those of `Answers`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Setup:
    """What a side is loaded with. `context`: tokens that a text may have; `options` are the side's own."""

    model: str
    draft_model: str | None
    draft_quant: str | None
    threads: int
    context: int
    lookup_tokens: int | None
    options: dict[str, Any]


@dataclass(frozen=True)
class Generated:
    """`seconds` are of the whole call, `first` up to the first token; `passes`: target passes, the prefill included."""

    tokens: list[int]
    seconds: float
    first: float | None
    passes: int | None


class Answers(Protocol):
    """`about`: versions and build, in a line."""

    about: str

    def generate(self, prompt: list[int], max_tokens: int) -> Generated:
        """Greedily, past any end of the text."""

    def pass_ms(self, rows: int, context: int) -> float:
        """Milliseconds of one pass of `rows` tokens after `context` cached ones, with the logits of every row."""

    def logits_of(self, tokens: list[int], candidates: list[int]) -> list[float]:
        """Logits of the candidates as the next token."""


@dataclass(frozen=True)
class Side:
    """`plain`: the side whose tokens it must emit. `rows`: what its passes are called, where they are timed."""

    name: str
    make: str
    options: dict[str, Any] = field(default_factory=dict)
    plain: str | None = None
    rows: str | None = None
    drafts: bool = False

    @property
    def is_lychee(self) -> bool:
        return self.make == LYCHEE


LYCHEE = "bench.peer_sides.lychee_side:LycheeSide"


def _lychee(form: str, quant: str | None) -> list[Side]:
    options = {"target_quant": quant}
    drafts = {**options, "speculative": True}
    rows = "lychee draft" if form == "fp32" else None
    return [
        Side(f"lychee-{form}", LYCHEE, {**options, "speculative": False}, rows=f"lychee {form}"),
        Side(f"lychee-{form}-speculative", LYCHEE, drafts, plain=f"lychee-{form}", rows=rows, drafts=True),
    ]


REFERENCE = "transformers"


def all_sides() -> dict[str, Side]:
    """By name, in the order of the table."""
    transformers = "bench.peer_sides.transformers_side:TransformersSide"
    llama = "bench.peer_sides.llama_cpp_side:LlamaCppSide"
    sides = [
        Side(REFERENCE, transformers, {"lookup": False}, rows="transformers fp32"),
        Side("transformers-lookup", transformers, {"lookup": True}, plain=REFERENCE),
        Side("llama.cpp", llama, {"lookup": False}),
        Side("llama.cpp-lookup", llama, {"lookup": True}, plain="llama.cpp", rows="llama.cpp"),
        *_lychee("fp32", "none"),
        *_lychee("int8", "int8"),
        *_lychee("file", None),
    ]
    return {side.name: side for side in sides}
