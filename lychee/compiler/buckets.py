"""Lowered programs by the sizes that they were lowered for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from torch import Tensor

from .lower import Lowered, lower
from .program import Program
from .sizes import Sizes

AFTER = 4
"""Times that a bucket is left to run op by op first: lowering takes as long as they lose by that."""
KEPT = 256


class Buckets:
    """Lowers programs that come again, and keeps the last `kept` of them, which share an arena: one runs at a time."""

    def __init__(self, after: int = AFTER, kept: int = KEPT) -> None:
        self.after, self.kept = after, kept
        self._arena: Tensor | None = None
        self._known: OrderedDict[Hashable, Lowered | int] = OrderedDict()

    def lowered(self, program: Hashable, make: Callable[[], Program], sizes: Sizes) -> Lowered | None:
        """The program of this name at these sizes; None for the first `after` times that they come."""
        key = program, *sizes.values()
        found = self._known.pop(key, 0)
        if isinstance(found, int) and found >= self.after:
            found = lower(make(), sizes, self._arena)
            self._arena = found.arena
        self._known[key] = found + 1 if isinstance(found, int) else found
        if len(self._known) > self.kept:
            self._known.popitem(last=False)
        return None if isinstance(found, int) else found

    def __len__(self) -> int:
        return len(self._known)
