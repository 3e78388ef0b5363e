"""Layout: which rows a batch has, the part of it that is the same round after round and is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


def ints(values: Sequence[int] | NDArray[Any]) -> Ints:
    return np.array(values, np.int32)


@dataclass(frozen=True, eq=False)
class Layout:
    """Row r is node `nodes[r]` of sequence `seq_idx[r]`: at slot context_len + node and position context_len + depth.

    Rows of a sequence are together, in the order of their nodes. `ancestors` [num_tokens, max_path] is each row's path
    by depth, itself last and -1 past it; None for chunks of prompts, which see all before them.
    """

    seq_idx: Ints
    nodes: Ints
    depths: Ints
    ancestors: Ints | None
    cu_seqlens_q: Ints
    max_rows: int

    @staticmethod
    def chunks(counts: Sequence[int]) -> Layout:
        """So many rows of each sequence, one after the other."""
        cu_seqlens_q = ints([0, *accumulate(counts)])
        seq_idx = np.arange(len(counts), dtype=np.int32).repeat(counts)
        local = np.arange(cu_seqlens_q[-1], dtype=np.int32) - cu_seqlens_q[seq_idx]
        return Layout(seq_idx, local, local, None, cu_seqlens_q, max(counts))

    @staticmethod
    @lru_cache(maxsize=256)
    def trees(parents: tuple[tuple[int, ...], ...]) -> Layout:
        """Every node of one tree per sequence; its parents start with -1 and name earlier nodes, else ValueError."""
        paths: list[list[list[int]]] = []
        for tree in parents:
            if not tree or tree[0] != -1 or any(not 0 <= parent < i for i, parent in enumerate(tree) if i):
                raise ValueError("parents must give -1 for each tree's first node and an earlier node for every other")
            paths.append([[0]])
            for node, parent in enumerate(tree[1:], 1):
                paths[-1].append([*paths[-1][parent], node])
        every = list(chain.from_iterable(paths))
        ancestors = np.full((len(every), max(map(len, every))), -1, np.int32)
        for row, path in enumerate(every):
            ancestors[row, : len(path)] = path
        rows = Layout.chunks([len(tree) for tree in parents])
        depths = ints([len(path) - 1 for path in every])
        return Layout(rows.seq_idx, rows.nodes, depths, ancestors, rows.cu_seqlens_q, rows.max_rows)

    def take(self, rows: Ints) -> Layout:
        """Some of the rows, in ascending order. Every sequence stays, with no row perhaps."""
        assert self.ancestors is not None
        seq_idx, depths = self.seq_idx[rows], self.depths[rows]
        counts = np.bincount(seq_idx, minlength=len(self.cu_seqlens_q) - 1)
        cu_seqlens_q = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
        ancestors = np.ascontiguousarray(self.ancestors[rows, : depths.max() + 1])
        return Layout(seq_idx, self.nodes[rows], depths, ancestors, cu_seqlens_q, int(counts.max()))

    def after(self, num_before: int) -> Layout:
        """The same rows where `num_before` nodes, a chain from its root, come before each tree's root."""
        assert self.ancestors is not None
        before = np.broadcast_to(np.arange(num_before, dtype=np.int32), (len(self.nodes), num_before))
        path = np.where(self.ancestors >= 0, self.ancestors + num_before, -1)
        ancestors = np.concatenate([before, path], 1).astype(np.int32)
        nodes, depths = self.nodes + num_before, self.depths + num_before
        return Layout(self.seq_idx, nodes, depths, ancestors, self.cu_seqlens_q, self.max_rows)


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one pass on the host: a layout, where its sequences are, and the tokens.

    tokens, positions, slots: [num_tokens] int32; context_lens: [num_seqs]; block_tables: [num_seqs, max_blocks].
    """

    layout: Layout
    tokens: Ints
    positions: Ints
    slots: Ints
    context_lens: Ints
    block_tables: Ints
    block_size: int
    logit_rows: Ints | None = None

    @staticmethod
    def of(
        layout: Layout,
        tokens: Ints,
        context_lens: Sequence[int] | Ints,
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        logit_rows: Ints | None = None,
    ) -> Rows:
        """Raises ValueError where a sequence has fewer slots than its nodes need."""
        lens = np.asarray(context_lens, np.int32)
        # The pad is never read; block 0 keeps even a stray address inside the cache.
        tables = np.zeros((len(lens), max(map(len, block_tables))), np.int32)
        for seq, blocks in enumerate(block_tables):
            tables[seq, : len(blocks)] = blocks
        starts = lens[layout.seq_idx]
        places = starts + layout.nodes
        nth = places // block_size
        if nth.max(initial=0) >= min(map(len, block_tables)):
            _check_blocks(layout.seq_idx, places, block_tables, block_size)
        # block * block_size + place % block_size, rearranged
        slots = (tables[layout.seq_idx, nth] - nth) * block_size + places
        return Rows(layout, tokens, starts + layout.depths, slots, lens, tables, block_size, logit_rows)

    @classmethod
    def prefill(
        cls,
        tokens: Sequence[Sequence[int]],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        logit_rows: Sequence[int] | None = None,
    ) -> Rows:
        """One chunk per sequence: row i is the token at position `context_len + i`, stored at that slot."""
        layout = Layout.chunks([len(chunk) for chunk in tokens])
        asked = None if logit_rows is None else ints(logit_rows)
        return cls.of(layout, _flat(tokens), context_lens, block_tables, block_size, asked)

    @classmethod
    def decode(
        cls,
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        logit_rows: Sequence[int] | None = None,
    ) -> Rows:
        """One tree per sequence: row i is node i, at slot `context_len + i` and position `context_len + depth(i)`.

        A chain is the tree whose parents are -1, 0, 1, ...; one node is plain decoding. Raises ValueError where a tree
        does not start with parent -1 or names a parent that does not come before its child.
        """
        layout = Layout.trees(tuple(map(tuple, parents)))
        if [len(row) for row in tokens] != [len(tree) for tree in parents]:
            raise ValueError("parents must give -1 for each tree's first node and an earlier node for every other")
        asked = None if logit_rows is None else ints(logit_rows)
        return cls.of(layout, _flat(tokens), context_lens, block_tables, block_size, asked)

    @property
    def max_context(self) -> int:
        return int(self.context_lens.max())


def _check_blocks(seq_idx: Ints, places: Ints, block_tables: Sequence[Sequence[int]], block_size: int) -> None:
    for seq, place in zip(seq_idx.tolist(), places.tolist(), strict=True):
        blocks = len(block_tables[seq])
        if place >= blocks * block_size:
            needed = places[seq_idx == seq].max() + 1
            raise ValueError(
                f"block_tables[{seq}] has {blocks} blocks of {block_size} slots, {needed} slots are needed"
            )


def _flat(values: Sequence[Sequence[int]]) -> Ints:
    return np.fromiter(chain.from_iterable(values), np.int32)
