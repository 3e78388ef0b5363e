"""Rate limits of each API key: requests and tokens per minute, and requests at a time."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from limits import RateLimitItem, RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import RateLimiter, SlidingWindowCounterRateLimiter

from lychee.nouns import counted

from .config import RateLimits
from .errors import ApiError, bad


class Rates:
    """Counts over sliding minutes, in memory."""

    def __init__(self, limits: RateLimits) -> None:
        self.limits = limits
        self._limiter: RateLimiter = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._requests = _per_minute(limits.requests_per_minute, "requests")
        self._tokens = _per_minute(limits.tokens_per_minute, "tokens")
        self._open: Counter[str] = Counter()

    @contextmanager
    def request(self, key: str) -> Iterator[None]:
        """One request of the key, while it lasts. Raises ApiError: 429, with the seconds until there is room."""
        most = self.limits.concurrency
        if most is not None and self._open[key] >= most:
            raise _limited("concurrency_limit", f"{counted(most, 'request')} may be open at a time, as are", 1)
        self._take(self._requests, key, 1, "requests")
        self._open[key] += 1
        try:
            yield
        finally:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]

    def tokens(self, key: str, count: int) -> None:
        """So many tokens of the key. Raises ApiError."""
        if self._tokens is not None and count > self._tokens.amount:
            raise bad(
                "max_tokens",
                f"prompt and max_tokens make {count} tokens where {self._tokens.amount} a minute are allowed",
                "rate_limit_never_fits",
            )
        self._take(self._tokens, key, count, "tokens")

    def _take(self, item: RateLimitItem | None, key: str, count: int, what: str) -> None:
        if item is None or self._limiter.hit(item, key, cost=count):
            return
        reset = self._limiter.get_window_stats(item, key).reset_time - time.time()
        wait = min(max(1, math.ceil(reset)), 60)
        raise _limited("rate_limit_exceeded", f"{item.amount} {what} a minute are allowed, and used up", wait)


def _per_minute(amount: int | None, what: str) -> RateLimitItem | None:
    return None if amount is None else RateLimitItemPerMinute(amount, 1, what)


def _limited(code: str, message: str, wait_s: int) -> ApiError:
    return ApiError(429, code, f"{message}; try again in {wait_s} s", retry_after_s=wait_s)
