"""The controller: how many tokens to draft for each request in each round."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from .config import SpeculativeConfig
from .goes_on import GoesOn
from .tree import ProposedTree, TreeShape

BUCKETS = (4, 8, 12, 16, 24, 32)
SHORT = (1, 2, 3)
WINDOW = 8  # rounds
REJECTIONS_TO_SHORTEN = 2  # full rejections in a row that drop to the smallest bucket
REJECTIONS_TO_STOP = 4  # full rejections in a row after which the request decodes natively for a while
FIRST_PAUSE, LAST_PAUSE = 4, 64  # rounds of native decoding before the next probe; doubles with each failed probe


class Controller(Protocol):
    """Plans one TreeShape per request and round, and learns from what was accepted."""

    @property
    def shapes(self) -> Seq[TreeShape]:
        """All that it plans, less those that a limit cuts."""

    def plan(self, request_ids: Seq[int]) -> list[TreeShape]: ...

    @property
    def goes_on(self) -> GoesOn | None:
        """Asked while a tree is drafted; None drafts it whole."""

    def observe(self, request_id: int, tree: ProposedTree, path: Seq[int], emitted: int) -> None:
        """One round's outcome: its tree, the accepted path's nodes, root first, and how many tokens were emitted.

        Fewer are emitted than the path has nodes where the text ended within it.
        """

    def timed(self, trees: Seq[ProposedTree], draft_ms: float, verify_ms: float, other_ms: float) -> None:
        """What a round of these trees took: drafting, verification, and all that the host does besides."""

    def forget(self, request_id: int) -> None:
        """The request has ended."""


@dataclass(frozen=True)
class Fixed:
    """The same shape in every round."""

    shape: TreeShape
    goes_on: GoesOn | None = None

    @property
    def shapes(self) -> Seq[TreeShape]:
        return (self.shape,)

    def plan(self, request_ids: Seq[int]) -> list[TreeShape]:
        return [self.shape] * len(request_ids)

    def observe(self, request_id: int, tree: ProposedTree, path: Seq[int], emitted: int) -> None: ...

    def timed(self, trees: Seq[ProposedTree], draft_ms: float, verify_ms: float, other_ms: float) -> None: ...

    def forget(self, request_id: int) -> None: ...


@dataclass
class _History:
    bucket: int = 0
    rounds: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    rejections: int = 0
    native_left: int = 0
    pause: int = FIRST_PAUSE


class Window:
    """Lengthens while a sliding window of rounds accepts much, shortens below the threshold, stops when nothing is.

    A rate above (1 + threshold) / 2 takes the next bucket, one below the threshold the previous. Full rejections in a
    row drop to the smallest bucket, then to native decoding, from which a short chain probes with exponential backoff.
    """

    goes_on = None

    def __init__(self, max_draft_len: int, threshold: float) -> None:
        self.buckets = [b for b in BUCKETS if b < max_draft_len] + [max_draft_len]
        self.threshold = threshold
        self._history: dict[int, _History] = {}

    @property
    def shapes(self) -> Seq[TreeShape]:
        ends = [length for length in SHORT if length < self.buckets[0]]  # of requests that have room for no more
        return [TreeShape.chain(length) for length in (0, *ends, *self.buckets)]

    def plan(self, request_ids: Seq[int]) -> list[TreeShape]:
        return [TreeShape.chain(self._length(self._history.setdefault(i, _History()))) for i in request_ids]

    def _length(self, history: _History) -> int:
        if history.native_left:
            history.native_left -= 1
            return 0
        return self.buckets[history.bucket]

    def observe(self, request_id: int, tree: ProposedTree, path: Seq[int], emitted: int) -> None:
        shape = tree.shape
        if shape.depth == 0:
            return
        drafted, accepted = len(shape.trunk) - 1, shape.on_trunk(path)
        if emitted < len(path):  # the text ended here
            drafted, accepted = min(drafted, emitted), min(accepted, emitted)
        history = self._history.setdefault(request_id, _History())
        history.rejections = history.rejections + 1 if accepted == 0 else 0
        if history.rejections >= REJECTIONS_TO_STOP:
            history.native_left = history.pause
            history.pause = min(2 * history.pause, LAST_PAUSE)
            history.rejections = REJECTIONS_TO_STOP - 1  # one more failure pauses again
        elif accepted:
            history.pause = FIRST_PAUSE
        if history.rejections >= REJECTIONS_TO_SHORTEN:
            history.bucket = 0
            history.rounds.clear()
            return
        history.rounds.append((drafted, accepted))
        rate = sum(a for _, a in history.rounds) / sum(d for d, _ in history.rounds)
        step = (rate > (1 + self.threshold) / 2) - (rate < self.threshold)
        if step and len(history.rounds) * 2 >= WINDOW:
            bucket = min(max(history.bucket + step, 0), len(self.buckets) - 1)
            if bucket != history.bucket:
                history.bucket = bucket
                history.rounds.clear()

    def timed(self, trees: Seq[ProposedTree], draft_ms: float, verify_ms: float, other_ms: float) -> None: ...

    def forget(self, request_id: int) -> None:
        self._history.pop(request_id, None)


def make_controller(config: SpeculativeConfig) -> Controller:
    """The controller of chains, or of one tree; `planned.Planned` is that of `tree="auto"`."""
    if isinstance(config.shape, TreeShape):
        return Fixed(config.shape)
    if not config.adaptive or config.max_draft_len == 0:
        return Fixed(TreeShape.chain(config.max_draft_len))
    return Window(config.max_draft_len, config.acceptance_threshold)
