"""Which sizes of trees are planned, so that few programs serve every round."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
WIDTHS = (1, 2, 4, 8)


@dataclass(frozen=True)
class ShapeBuckets:
    """The sizes that a planned shape may have.

    rows: nodes to verify, root included; a shape has exactly one of these numbers, so that verification pads nothing.
        They are close where a pass over few rows costs by the row, and multiples of a kernel's row tile further on.
    depths: levels of drafted nodes, 0 for plain decoding; a shape has exactly one of these.
    widths: frontier rows that the levels after the root's have at most. A shape is charged for so many in all of them.
    """

    rows: tuple[int, ...]
    depths: tuple[int, ...]
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("depths", 0), ("widths", 1)):
            sizes = getattr(self, name)
            if sizes[:1] != (least,) or list(sizes) != sorted(set(sizes)):
                raise ValueError(f"{name} is {sizes}, must start with {least} and rise")


@lru_cache
def shape_buckets(node_budget: int, max_depth: int) -> ShapeBuckets:
    """Buckets for at most `node_budget` drafted nodes, the root not counted, in at most `max_depth` levels.

    Depths are one below the rows, so that a chain fills its rows. The limits themselves are buckets too.
    """
    max_depth = min(max_depth, node_budget)
    rows = (*(size for size in ROWS if size <= node_budget), node_budget + 1)
    depths = (*(size - 1 for size in ROWS if size <= max_depth), max_depth)
    return ShapeBuckets(rows, depths, tuple(size for size in WIDTHS if size <= max(1, node_budget)))
