"""The prefix cache: which blocks of a sequence's prefix hold KV already, and which of its own others may share."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from .blocks import BlockPool
from .sequence import Sequence

ROOT = b"lychee prefix"  # keeps roots apart by kind


@dataclass(frozen=True)
class Hit:
    """Blocks of a sequence's prefix. `shared` it will only read; `last` is the one after them, in which it will write.

    cached: tokens whose KV they hold, less the sequence's last one, which is always computed.
    """

    shared: tuple[int, ...]
    last: int | None
    cached: int


class PrefixCache:
    """A block's key is a digest of its salt and of all tokens up to its end. Equal keys mean equal KV."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool

    def find(self, seq: Sequence) -> Hit:
        """What the pool holds of a sequence that waits."""
        size, tokens = self.pool.block_size, seq.tokens
        # It computes its last token again. The draft of one that resumes also runs the token before that, its root.
        first_written = len(tokens) - 1 - (seq.num_emitted > 0)
        keys, shared = self._keys(seq, len(tokens) // size), list[int]()
        for key in keys[: first_written // size]:
            if (block := self.pool.find(key)) is None:
                return Hit(tuple(shared), None, len(shared) * size)
            shared.append(block)
        whole, last = len(shared) * size, None
        if len(shared) < len(keys) and whole < len(tokens) - 1:
            last = self.pool.find(keys[len(shared)])
        cached = whole if last is None else min(whole + size, len(tokens) - 1)
        return Hit(tuple(shared), last, cached)

    def room(self, hit: Hit) -> int:
        """How many blocks can be allocated once the hit is taken, besides a copy of `last`."""
        taken = (*hit.shared, *(() if hit.last is None else (hit.last,)))
        return self.pool.num_free - sum(map(self.pool.is_idle, taken))

    def take(self, seq: Sequence, hit: Hit) -> tuple[int, int] | None:
        """Begin the sequence with the hit's blocks. A `last` that nobody uses becomes its own; else a copy does.

        Returns the block to be copied before the next pass, and where to.
        """
        pool, copied = self.pool, None
        seq.blocks = pool.share(hit.shared)
        if hit.last is not None and pool.is_idle(hit.last):
            pool.claim(hit.last)
            seq.blocks.append(hit.last)
        elif hit.last is not None:
            seq.blocks += pool.allocate(1)
            pool.drafted[seq.blocks[-1]] = pool.drafted[hit.last]
            copied = hit.last, seq.blocks[-1]
        seq.cached, seq.published = hit.cached, len(hit.shared)
        seq.draft_cached = self._drafted(seq)
        return copied

    def publish(self, seq: Sequence, ended: bool = False) -> None:
        """Blocks that the sequence has filled and writes no more. ended: it writes nothing more at all."""
        # A draft runs the token before the root again in every round.
        pool, count = self.pool, (seq.cached - (not ended)) // self.pool.block_size
        if count <= seq.published:
            return
        keys = self._keys(seq, count)
        for nth in range(seq.published, count):
            block, drafted = seq.blocks[nth], seq.draft_cached - nth * pool.block_size
            pool.drafted[block] = max(pool.drafted[block], min(drafted, pool.block_size))
            pool.publish(block, keys[nth])
        seq.published = count

    def _drafted(self, seq: Sequence) -> int:
        size, drafted = self.pool.block_size, 0
        for block in seq.blocks:
            drafted += self.pool.drafted[block]
            if self.pool.drafted[block] < size:
                break
        return min(drafted, seq.cached)

    def _keys(self, seq: Sequence, count: int) -> list[bytes]:
        """Keys of the first `count` blocks of the sequence's tokens, all of them full."""
        size, keys = self.pool.block_size, seq.keys
        if len(keys) < count:
            new = np.array(seq.tokens[len(keys) * size : count * size], "<i4").reshape(-1, size)
            parent = keys[-1] if keys else self._root(seq)
            for tokens in new:
                parent = blake2b(parent + tokens.tobytes(), digest_size=32).digest()
                keys.append(parent)
        return keys[:count]

    def _root(self, seq: Sequence) -> bytes:
        """Without keeping, the completions of one request share its blocks, and nobody else does."""
        who = f"salt {seq.cache_salt}" if self.pool.keeps else f"request {seq.request_id}"
        return blake2b(ROOT + who.encode(errors="surrogatepass"), digest_size=32).digest()
