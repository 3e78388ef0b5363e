"""The block pool: ids of KV blocks with reference counts. One id names the same block in both models' storage."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Hands out block ids 0..num_blocks-1. A block returns to the pool when its last reference is released.

    A full block may be published under a key that says what it holds; `find` then gives it to others, who may share it.
    keeps: published blocks without a reference are kept, and evicted, those longest out of use first, where no other
    block is free. Otherwise they are forgotten with their last reference.
    drafted: by block, in how many of its leading slots the draft model's KV is valid, at least. The target's is valid
    in all slots of a published block.
    """

    def __init__(self, num_blocks: int, block_size: int, keeps: bool = False) -> None:
        self.num_blocks, self.block_size, self.keeps = num_blocks, block_size, keeps
        self.drafted = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: dict[int, None] = {}  # kept without a reference, in the order of eviction
        self._refs = [0] * num_blocks
        self._keys: dict[int, bytes] = {}  # of published blocks
        self._named: dict[bytes, int] = {}
        self.max_used = 0  # most blocks in use or kept at once

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give, kept ones among them."""
        return len(self._free) + len(self._idle)

    def blocks_for(self, num_slots: int) -> int:
        """Blocks that hold `num_slots` slots."""
        return -(-num_slots // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. Raises MemoryError when too few are free; then none is taken."""
        if count > self.num_free:
            raise MemoryError(f"{count} KV blocks asked for, {self.num_free} of {self.num_blocks} free")
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in taken:
            self._refs[block], self.drafted[block] = 1, 0
        self.max_used = max(self.max_used, self.num_blocks - len(self._free))
        return taken

    def share(self, blocks: Iterable[int]) -> list[int]:
        """One more reference to each of the blocks, which must be in use or kept."""
        shared = list(blocks)
        for block in shared:
            if self._refs[block] == 0 and block not in self._idle:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._idle.pop(block, None)
            self._refs[block] += 1
        return shared

    def release(self, blocks: Iterable[int]) -> None:
        """Give one reference of each block back. Of blocks kept, those released first are evicted first."""
        for block in blocks:
            if self._refs[block] == 0:
                raise ValueError(f"block {block} is released twice")
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if block in self._keys and self.keeps:
                self._idle[block] = None
            else:
                self._withdraw(block)
                self._free.append(block)

    def publish(self, block: int, key: bytes) -> None:
        """The block, in use, holds what `key` says and is not written any more. Nothing if another has the key."""
        if self._refs[block] == 0:
            raise ValueError(f"block {block} is free and cannot be published")
        if key not in self._named and block not in self._keys:
            self._keys[block], self._named[key] = key, block

    def find(self, key: bytes) -> int | None:
        """The block published under a key."""
        return self._named.get(key)

    def is_idle(self, block: int) -> bool:
        """It is kept, and nobody uses it."""
        return block in self._idle

    def claim(self, block: int) -> None:
        """Take an idle block, with what it holds, for one sequence alone: it is published no more."""
        del self._idle[block]
        self._withdraw(block)
        self._refs[block] = 1

    def forget(self) -> None:
        """No block is kept or published any more."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._keys.clear()
        self._named.clear()

    def _evict(self) -> int:
        block = next(iter(self._idle))
        del self._idle[block]
        self._withdraw(block)
        return block

    def _withdraw(self, block: int) -> None:
        if key := self._keys.pop(block, None):
            del self._named[key]
