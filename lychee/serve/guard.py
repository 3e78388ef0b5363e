"""The guard of the accelerated channel: takes its share back where it is worse than the plain one."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from lychee.runtime.trial import Trial

from .channel import CHANNELS, Channel, channel_name
from .config import Margins
from .job import EngineFailedError

LEAST_PAIRS, LEAST_ERRORS = 12, 3
SURE = 3.0  # standard errors by which a margin must be exceeded
CHECK_S = 0.25


@dataclass(frozen=True)
class Verdict:
    """state: `off`, `not enough data`, `as good`, or `rolled back`, which `cause` did: `goodput` or `errors`.

    ratio: of tokens per second with drafts and without.
    """

    state: str
    reason: str
    cause: str | None = None
    ratio: float | None = None

    def report(self) -> dict[str, Any]:
        return {"state": self.state, "reason": self.reason, "goodput_ratio": self.ratio}


class Guard:
    """Belongs to the event loop; the trial's rounds are the engine's. tell: takes an entry for the log.

    It compares while the share is above 0 and below 1, and what both channels had within the last `window_s`.
    """

    def __init__(
        self,
        channel: Channel,
        trial: Trial,
        margins: Margins | None = None,
        tell: Callable[[dict[str, Any]], None] = lambda entry: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.channel, self.trial, self.margins = channel, trial, margins or Margins()
        self.tell, self.clock = tell, clock
        self.rollbacks: Counter[str] = Counter()  # by cause
        self.set_share(channel.share)

    def set_share(self, share: float) -> None:
        """Begin anew at a share: what was seen before does not count."""
        self.channel.share = share
        self._served: dict[str, float] = {}  # when a channel last had a token
        self._ends: deque[tuple[float, str, bool]] = deque(maxlen=10_000)  # when, of which channel, whether failed
        self._begun = self._checked = self.clock()
        self._rolled_back: Verdict | None = None
        self.trial.running = 0.0 < share < 1.0

    def served(self, speculates: bool) -> None:
        """A completion got tokens."""
        self._served[channel_name(speculates)] = self.clock()
        self._check()

    def ended(self, speculates: bool, error: Exception | None) -> None:
        """A request has ended, with an error or without. An engine that failed while it drafted is not the plain
        channel's error, though its requests ended with it."""
        not_its_own = isinstance(error, EngineFailedError) and error.accelerated and not speculates
        self._ends.append((self.clock(), channel_name(speculates), error is not None and not not_its_own))
        self._check()

    @property
    def verdict(self) -> Verdict:
        if self._rolled_back is not None:
            return self._rolled_back
        if not self.trial.running:
            return Verdict("off", f"all requests are of one channel: the share is {self.channel.share:g}")
        since = max(self._begun, self.clock() - self.margins.window_s)
        return self._by_errors(since) or self._by_goodput(since)

    def _check(self) -> None:
        now = self.clock()
        if not self.trial.running or now - self._checked < CHECK_S:
            return
        self._checked = now
        verdict = self.verdict
        if verdict.cause is not None:
            share = self.channel.share
            self.set_share(0.0)
            self._rolled_back = verdict
            self.rollbacks[verdict.cause] += 1
            entry = {"event": "rollback", "cause": verdict.cause, "reason": verdict.reason, "share": share}
            self.tell({"time": round(time.time(), 3), **entry})

    def _by_errors(self, since: float) -> Verdict | None:
        counts = Counter((name, failed) for at, name, failed in self._ends if at >= since)
        (ours, ended), (theirs, plain) = ((counts[n, True], counts[n, True] + counts[n, False]) for n in CHANNELS)
        if ours < LEAST_ERRORS or not plain:
            return None
        more = ours / ended - theirs / plain
        if more - SURE * math.hypot(_error(ours, ended), _error(theirs, plain)) <= self.margins.errors:
            return None
        told = f"{ours} of {ended} requests of the speculative channel failed, {theirs} of {plain} of the native one"
        allowed = f"{100 * self.margins.errors:g} points more are allowed"
        return Verdict("rolled back", f"{told}; {allowed}", "errors")

    def _by_goodput(self, since: float) -> Verdict:
        pairs = [pair for pair in self.trial.pairs if pair.at >= since]
        if missing := [name for name in CHANNELS if self._served.get(name, -math.inf) < since]:
            return Verdict("not enough data", f"no tokens lately of the {' and the '.join(missing)} channel")
        if len(pairs) < LEAST_PAIRS:
            return Verdict("not enough data", f"{len(pairs)} of {LEAST_PAIRS} comparisons with plain rounds are made")
        logs = [math.log(pair.drafted / pair.plain) for pair in pairs]
        mean, error = fmean(logs), stdev(logs) / math.sqrt(len(logs))
        ratio, least = math.exp(mean), 1.0 - self.margins.goodput
        low, high = math.exp(mean - SURE * error), math.exp(mean + SURE * error)
        told = f"drafting makes {ratio:.2f} times the tokens per second of plain rounds ({low:.2f} to {high:.2f}"
        told = f"{told} by {len(pairs)} comparisons); {least:.2f} is the least allowed"
        worse = high < least
        return Verdict("rolled back" if worse else "as good", told, "goodput" if worse else None, ratio)


def _error(failed: int, ended: int) -> float:
    """The standard error of a rate. One failure and one success are added, so that it is never 0."""
    rate = (failed + 1) / (ended + 2)
    return math.sqrt(rate * (1 - rate) / (ended + 2))
