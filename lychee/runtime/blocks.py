"""The block pool: ids of KV blocks with reference counts. One id names the same block in both models' storage."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Hands out block ids 0..num_blocks-1. A block returns to the pool when its last reference is released."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks
        self.max_used = 0  # most blocks in use at once

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_slots: int) -> int:
        """Blocks that hold `num_slots` slots."""
        return -(-num_slots // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. Raises MemoryError when too few are free; then none is taken."""
        if count > len(self._free):
            raise MemoryError(f"{count} KV blocks asked for, {len(self._free)} of {self.num_blocks} free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        self.max_used = max(self.max_used, self.num_blocks - len(self._free))
        return taken

    def share(self, blocks: Iterable[int]) -> list[int]:
        """One more reference to each of the blocks, which must be in use."""
        shared = list(blocks)
        for block in shared:
            if self._refs[block] == 0:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._refs[block] += 1
        return shared

    def release(self, blocks: Iterable[int]) -> None:
        """Give one reference of each block back."""
        for block in blocks:
            if self._refs[block] == 0:
                raise ValueError(f"block {block} is released twice")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free.append(block)
