"""Early exit: how a drafter asks whether to draft more of a tree."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol


class GoesOn(Protocol):
    """Whether to draft more of a tree, asked when some of its levels are drawn.

    levels: how many are drafted from one question to the next; 0 never asks.
    """

    @property
    def levels(self) -> int: ...

    def __call__(self, seq_id: int, depth: int, confidences: Seq[float]) -> bool:
        """Whether nodes below `depth` are drafted too.

        confidences: of the trunk's nodes above that depth, by depth: the draft's largest probability there. Their
        children are drawn, those of nodes at `depth` are not: of these nothing may be known that would bias them. Also
        told once the whole tree is drafted.
        """


@dataclass(frozen=True)
class Always:
    """Drafts whole trees, in as many programs as where it may stop."""

    levels: int

    def __call__(self, seq_id: int, depth: int, confidences: Seq[float]) -> bool:
        return True
