"""Asks all sides for the same, in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from . import Generated
from .client import Client


@dataclass(frozen=True)
class Sample:
    """One completion of the prompt of this index."""

    side: str
    prompt: int
    round: int
    made: Generated


def turns(sides: Sequence[str], num_prompts: int, rounds: int) -> Iterator[tuple[int, int, str]]:
    """Round, prompt and side: all sides on a prompt before the next. Another goes first on every prompt and round."""
    order = deque(sides)
    for turn in range(rounds):
        for prompt in range(num_prompts):
            yield from ((turn, prompt, side) for side in tuple(order))
            order.rotate(-1)
        if num_prompts % len(sides) == 0:
            order.rotate(-1)


def warm_up(clients: Mapping[str, Client], prompts: Sequence[list[int]], max_tokens: int) -> None:
    for client in clients.values():
        client.generate(prompts[0], max_tokens)


def samples(
    clients: Mapping[str, Client], prompts: Sequence[list[int]], max_tokens: int, rounds: int
) -> Iterator[Sample]:
    for turn, prompt, side in turns(list(clients), len(prompts), rounds):
        yield Sample(side, prompt, turn, clients[side].generate(prompts[prompt], max_tokens))


def pass_ms(
    clients: Mapping[str, Client], sizes: Sequence[int], context: int, repeats: int, turns: int = 4
) -> dict[str, dict[int, float]]:
    """Median milliseconds by what a side's passes are called and number of rows; a side's first repeat does not count.

    The sides take `turns` turns, with `repeats` passes of every size in each.
    """
    timed = {client.side.rows: client for client in clients.values() if client.side.rows}
    found: dict[str, list[list[float]]] = {name: [] for name in timed}
    order = deque(timed)
    for _ in range(turns):
        for name in order:
            found[name] += timed[name].rows(list(sizes), context, repeats + 1)[1:]
        order.rotate(-1)
    return {
        name: {rows: median(column) for rows, column in zip(sizes, zip(*passes, strict=True), strict=True)}
        for name, passes in found.items()
    }
