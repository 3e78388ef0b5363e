"""The model card of a draft."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from .data import KINDS, Text
from .decoder import KEPT
from .net import Draft


@dataclass(frozen=True)
class Facts:
    """What the card says of the run."""

    target: str
    licence: str
    command: list[str]
    layers: list[int]
    coverage: float
    steps: int
    tokens_seen: int
    target_parameters: int


def parameters(draft: Draft) -> int:
    """Those that the draft has of its own."""
    return sum(w.numel() for w in draft.net.parameters() if w.requires_grad)


def size_of(texts: list[Text]) -> str:
    """How much the target wrote."""
    return f"{sum(int(t.own.sum()) for t in texts):,} tokens in {len(texts):,} texts"


def share_of(counts: dict[int, tuple[int, int]], kind: int) -> str:
    """The agreement, and over how many places."""
    same, places = counts.get(kind, (0, 0))
    return f"{same / places:.3f} ({places:,})" if places else "-"


def card(draft: Draft, texts: list[Text], counts: dict[int, tuple[int, int]], facts: Facts) -> str:
    """The text of ``MODEL_CARD.md``."""
    shape, own, outputs = draft.net.shape, parameters(draft), len(draft.output_ids)
    rows = [f"| {k} | {share_of(counts, i)} | {share_of(counts, i + len(KINDS))} |" for i, k in enumerate(KINDS)]
    return f"""# Draft for {facts.target}

A model of {shape.num_hidden_layers} layers that proposes tokens for speculative decoding with {facts.target}.
It is of no use without it: it has no embedding and no tokenizer. Its input rows are the target's embedding; its output
rows are the {outputs:,} of them that belong to the token ids in `output_ids`. `embed_probe` holds 16 rows of
the target's embedding, by which another target is told.

Derived from {facts.target}, and under the same licence: {facts.licence}.

| parameters | |
|---|---|
| layers, in this file | {own:,} |
| the same of the target, without its embedding | {facts.target_parameters:,} |
| share | {own / facts.target_parameters:.4f} |
| last norm, the target's, copied | {shape.hidden_size:,} |
| output rows, the target's | {outputs * shape.hidden_size:,} |

## Training

The layers began as the target's layers {", ".join(map(str, facts.layers))}.
The target wrote {size_of([t for t in texts if not t.held])}:
answers to questions of its own and to forms filled with topics, some with a second question, and continuations of prose
and code; about half of them greedily, the rest at temperatures from 0.5 to 1. The draft learnt the distribution of the
target (its {KEPT} likeliest tokens) at every token that the target wrote, in {facts.steps:,} steps over
{facts.tokens_seen:,} places, repetition and padding included. Of the held-out
text the output ids cover {facts.coverage:.2%}.

    {shlex.join(facts.command)}

## Held-out agreement

Share of places where draft and target find the same token likeliest, and in brackets how many places, in texts that the
target wrote for held-out prompts ({size_of([t for t in texts if t.held])}).

| kind | target greedy | target sampled |
|---|---|---|
{chr(10).join(rows)}
"""
