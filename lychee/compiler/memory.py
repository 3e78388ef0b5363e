"""Where the values of a program lie: spans of one arena, shared by those that are not needed at the same time."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import NamedTuple

ALIGNMENT = 64


class Need(NamedTuple):
    """Bytes that are wanted from step `first` to step `last`, both included."""

    num_bytes: int
    first: int
    last: int


def assign(needs: Sequence[Need]) -> tuple[list[int], int]:
    """Each need's offset and the bytes of them all. Needs that share a step share no byte.

    In the order of their first steps, each in the lowest gap between those that are still needed.
    """
    offsets, most = [0] * len(needs), 0
    taken: list[tuple[int, int, int]] = []  # (begin, end, last step), ascending
    for index in sorted(range(len(needs)), key=lambda i: needs[i].first):
        num_bytes, first, last = needs[index]
        size, at = -(-num_bytes // ALIGNMENT) * ALIGNMENT, 0
        taken = [span for span in taken if span[2] >= first]
        for begin, end, _ in taken:
            if begin - at >= size:
                break
            at = end
        offsets[index] = at
        insort(taken, (at, at + size, last))
        most = max(most, at + size)
    return offsets, most
