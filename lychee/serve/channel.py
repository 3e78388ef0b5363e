"""The accelerated channel: which requests are drafted for. Its share may change at any time; what runs goes on."""

from __future__ import annotations

import hashlib

CHANNELS = ("speculative", "native")


def channel_name(speculates: bool) -> str:
    return CHANNELS[not speculates]


class Channel:
    """share: of users that are drafted for, 0 none and 1 all; between them who is chosen hangs on a hash alone."""

    def __init__(self, share: float = 1.0) -> None:
        self.share = share

    def takes(self, who: str) -> bool:
        """The same for one `who` while the share stays; a growing share keeps those that it has."""
        digest = hashlib.sha256(who.encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(digest[:8], "big") < self.share * 2.0**64
