"""The model card of a draft."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from .data import KINDS, Text
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
    return sum(w.numel() for w in draft.own_weights().values())


def card(draft: Draft, texts: list[Text], counts: dict[int, tuple[int, int]], facts: Facts) -> str:
    """The text of ``MODEL_CARD.md``."""
    own, width = parameters(draft), draft.net.shape.hidden_size
    sizes = {held: (sum(t.held == held for t in texts), sum(int(t.own.sum()) for t in texts if t.held == held)) for held in (False, True)}
    share = {k: "-" if not b else f"{a / b:.3f} ({b:,})" for k in range(6) for a, b in [counts.get(k, (0, 0))]}
    lines = "\n".join(f"| {kind} | {share[i]} | {share[i + 3]} |" for i, kind in enumerate(KINDS))
    return f"""# Draft for {facts.target}

A model of {draft.net.shape.num_hidden_layers} layers that proposes tokens for speculative decoding with {facts.target}. It cannot be used
without it: it has no embedding and no tokenizer of its own. Its input rows, and the {len(draft.output_ids):,} output rows for the ids in
`output_ids`, are the target's embedding. `embed_probe` holds 16 rows of that embedding, by which another target is told.

Derived from {facts.target}; licence: {facts.licence}, as the target's.

| parameters | |
|---|---|
| layers and last norm, in this file | {own:,} |
| the same of the target, without its embedding | {facts.target_parameters:,} (share {own / facts.target_parameters:.4f}) |
| output rows, shared with the target | {len(draft.output_ids) * width:,} |

## Training

The layers began as the target's layers {", ".join(map(str, facts.layers))}. The target wrote {sizes[False][1]:,} tokens in {sizes[False][0]:,} texts:
answers to questions of its own and to templates filled with topics, several turns, and continuations of prose and code; about half
greedily, the rest at temperatures from 0.5 to 1. The draft learnt the target's distribution (its 24 likeliest tokens) at every
token that the target wrote: {facts.steps:,} steps, {facts.tokens_seen:,} tokens with repetition and padding. The output ids cover {facts.coverage:.2%} of that text.

    {shlex.join(facts.command)}

## Held-out agreement

Share of places in texts for held-out prompts ({sizes[True][0]:,} texts, {sizes[True][1]:,} tokens that the target wrote) where draft and target
find the same token likeliest; in brackets how many places.

| kind | target greedy | target sampled |
|---|---|---|
{lines}
"""
