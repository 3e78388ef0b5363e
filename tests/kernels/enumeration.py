"""Exact enumeration of drafting and acceptance over a small vocabulary, in float64.

Every ordered draw of children is taken with its probability; a shipped `walk` is then run once for each sequence of
its accept decisions. What is emitted is continued by sampling from the target until all sequences are equally long.
"""

from collections.abc import Callable, Iterator
from itertools import permutations, product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lychee.kernels.accept_residual import Decision, Walk

VOCAB = 5
Context = tuple[int, ...]
Law = Callable[[Context], Tensor]
Drafter = Callable[[Tensor, int], Iterator[tuple[Context, float]]]
Chance = Callable[[int, float, list[bool]], float]  # of (node, the chance that was asked for, decisions made before)


class Laws:
    """A next-token distribution for every context up to three tokens."""

    def __init__(self, seed: int, shape: Callable[[Tensor], Tensor] = lambda weights: weights) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table: dict[Context, Tensor] = {}
        for length in range(4):
            for context in product(range(VOCAB), repeat=length):
                weights = shape(torch.rand(VOCAB, dtype=torch.float64, generator=generator) ** 2 + 0.02)
                self.table[context] = weights / weights.sum()

    def __call__(self, context: Context) -> Tensor:
        return self.table[context]


def ordered_draws(probs: Tensor, count: int) -> Iterator[tuple[Context, float]]:
    """Draws without replacement in order, -1 where the support ran out."""
    support = [token for token in range(VOCAB) if probs[token] > 0]
    drawn = min(count, len(support))
    for tokens in permutations(support, drawn):
        left = [float(probs[[t for t in support if t not in tokens[:i]]].sum()) for i in range(drawn)]
        chance = prod(float(probs[t]) / rest for t, rest in zip(tokens, left, strict=True))
        yield (*tokens, *(-1,) * (count - drawn)), chance


def draws_with_replacement(probs: Tensor, count: int) -> Iterator[tuple[Context, float]]:
    """Draws with replacement."""
    for tokens in product([token for token in range(VOCAB) if probs[token] > 0], repeat=count):
        yield tokens, prod(float(probs[token]) for token in tokens)


def drafted(
    parents: list[int], draft: Law, drafter: Drafter = ordered_draws
) -> Iterator[tuple[list[int], dict[int, Context], float]]:
    """Every tree of a shape: its tokens, the contexts of its living nodes, and its probability."""

    def grow(node: int, tokens: list[int], contexts: dict[int, Context], chance: float) -> Iterator:
        if node == len(parents):
            yield tokens, contexts, chance
            return
        children = [child for child, parent in enumerate(parents) if parent == node]
        draws = drafter(draft(contexts[node]), len(children)) if node in contexts else [((-1,) * len(children), 1.0)]
        for drawn, p in draws:
            placed, below = list(tokens), dict(contexts)
            for child, token in zip(children, drawn, strict=True):
                placed[child] = token
                if token >= 0:
                    below[child] = (*contexts[node], token)
            yield from grow(node + 1, placed, below, chance * p)

    yield from grow(0, [0] * len(parents), {0: ()}, 1.0)


def decisions(run: Callable[[Decision], tuple[list[int], Tensor]], chance_of: Chance) -> Iterator:
    """Runs once for each sequence of accept decisions; yields (path, weights, probability)."""
    pending: list[list[bool]] = [[]]
    while pending:
        planned, made, chance = pending.pop(), [], [1.0]

        def accept(node, asked, planned=planned, made=made, chance=chance):
            p = chance_of(node, asked, made)
            if len(made) < len(planned):
                take = planned[len(made)]
            else:
                take = p > 0
                if 0 < p < 1:
                    pending.append([*made, False])
            chance[0] *= p if take else 1 - p
            made.append(take)
            return take

        path, weights = run(accept)
        yield path, weights, chance[0]


def independent(node: int, asked: float, made: list[bool]) -> float:
    return asked


class Emission(NamedTuple):
    error: float  # the largest, of the probability of any emitted sequence
    accepted: float  # mean length of the accepted path, less the root


def emission(
    walk: Walk,
    parents: list[int],
    target: Law,
    draft: Law,
    *,
    lossless: bool = True,
    max_path: int = 4,
    drafter: Drafter = ordered_draws,
    divisor: Law | None = None,
    edit: Callable[[list[int], dict[int, Context]], tuple[list[int], dict[int, Context]]] = lambda *tree: tree,
    chance_of: Callable[[], Chance] = lambda: independent,
) -> Emission:
    """`draft` is drawn from, `divisor` divided by; the two are one unless a test breaks it."""
    ended: dict[Context, Tensor] = {}
    accepted = 0.0
    for tokens, contexts, drafted_chance in drafted(parents, draft, drafter):
        tokens, contexts = edit(tokens, contexts)
        nowhere = torch.full((VOCAB,), float("nan"), dtype=torch.float64)
        known = [contexts.get(node) for node in range(len(parents))]
        inner = [known[node] if node in parents else None for node in range(len(parents))]
        rows = [
            torch.stack([nowhere if at is None else law(at) for at in at_nodes]).log()
            for law, at_nodes in ((target, known), (divisor or draft, inner))
        ]
        run = lambda accept, tokens=tokens, rows=rows: walk(tokens, parents, *rows, accept, max_path, lossless)  # noqa: E731
        for path, weights, chance in decisions(run, chance_of()):
            law = weights / weights.sum() * chance * drafted_chance
            ended[contexts[path[-1]]] = ended.get(contexts[path[-1]], 0.0) + law
            accepted += (len(path) - 1) * chance * drafted_chance
    length = max(map(len, ended)) + 1
    emitted = torch.zeros([VOCAB] * length, dtype=torch.float64)
    for context, law in ended.items():
        emitted[context] += extended(target, context, law, length)
    assert abs(float(emitted.sum()) - 1) < 1e-12
    return Emission(float((emitted - extended(target, (), target(()), length)).abs().max()), accepted)


def extended(target: Law, context: Context, law: Tensor, length: int) -> Tensor:
    """Joint law of the tokens after `context` up to `length`, the first distributed by `law`."""
    if len(context) + 1 == length:
        return law
    after = [extended(target, (*context, token), target((*context, token)), length) for token in range(VOCAB)]
    return torch.stack([law[token] * rest for token, rest in enumerate(after)])
