"""Settings of the service."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RateLimits:
    """For each API key, None being no limit. A request counts with its prompt and all that it may generate."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


@dataclass(frozen=True)
class Margins:
    """By how much the speculative channel may be worse before it is taken back, both shares of 1, as seen within
    `window_s` seconds: fewer tokens per second, and more requests that fail."""

    goodput: float = 0.1
    errors: float = 0.05
    window_s: float = 60.0


@dataclass(frozen=True)
class ServiceConfig:
    """api_keys: any of them opens everything but /admin, which `admin_key` opens; without any, nothing needs one.

    max_completions: n, times the prompts of a call. max_stops: strings in a stop list, and in bad_words; entries of
    logit_bias and stop_token_ids may be 64 times as many. body_s: seconds in which a body must have come. stall_s:
    after which a client that reads nothing is dropped. drain_s: that open requests have after SIGTERM.
    speculation_share: of users, or of requests without one, that are drafted for. Where it is between 0 and 1, it is
    taken back when the margins are exceeded.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    rates: RateLimits = field(default_factory=RateLimits)
    max_body_bytes: int = 1 << 20
    max_completions: int = 16
    max_logprobs: int = 20
    max_stops: int = 16
    max_stop_chars: int = 256
    body_s: float = 30.0
    stall_s: float = 60.0
    drain_s: float = 30.0
    speculation_share: float = 1.0
    margins: Margins = field(default_factory=Margins)
    cors_origins: tuple[str, ...] = ()
    log_prompts: bool = False
