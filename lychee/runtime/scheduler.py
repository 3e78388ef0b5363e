"""The scheduler: which sequences the next step works on. Requests join and leave between rounds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from .blocks import BlockPool
from .prefix_cache import PrefixCache
from .sequence import Sequence


@dataclass(frozen=True)
class PrefillChunk:
    """Prompt tokens [start, stop) of a sequence to prefill."""

    seq: Sequence
    start: int
    stop: int


@dataclass(frozen=True)
class Work:
    """One step: prefill chunks or decoding sequences, never both.

    admitted: sequences that begin with it, or resume. copies: blocks whose KV is copied before it, and where to.
    """

    chunks: tuple[PrefillChunk, ...] = ()
    decode: tuple[Sequence, ...] = ()
    admitted: tuple[Sequence, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()


class Scheduler:
    """First come, first served. Prefill steps alternate with decode rounds while both have work.

    prefill_budget: prompt tokens per step while others decode, who wait for it; None: max_num_batched_tokens, as else.
    """

    def __init__(
        self, pool: BlockPool, max_num_seqs: int, max_num_batched_tokens: int, prefill_budget: int | None = None
    ) -> None:
        self.pool, self.max_num_seqs, self.max_num_batched_tokens = pool, max_num_seqs, max_num_batched_tokens
        self.prefill_budget = prefill_budget or max_num_batched_tokens
        self.prefixes = PrefixCache(pool)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival
        self.num_preemptions = 0
        self._prefilled_last = False

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def next(self) -> Work:
        """The next step's work. A prefill is preferred after a decode round; slots for one node each are reserved."""
        work = Work()
        if not (self._prefilled_last and any(s.decoding for s in self.running)):
            work = self._admit()
            if chunks := self._chunks():
                self._prefilled_last = True
                return replace(work, chunks=chunks)
        self._prefilled_last = False
        return replace(work, decode=self._decoders())

    def finish(self, seq: Sequence) -> None:
        """The sequence has ended or was aborted: its blocks go back."""
        self._release(seq)
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)

    def extend(self, seq: Sequence, num_nodes: int) -> int:
        """Reserve slots for up to `num_nodes` nodes of the round without preempting; how many have a slot."""
        needed = self.pool.blocks_for(seq.cached + num_nodes) - len(seq.blocks)
        seq.blocks += self.pool.allocate(min(max(needed, 0), self.pool.num_free))
        return min(num_nodes, len(seq.blocks) * self.pool.block_size - seq.cached)

    def settle(self, seq: Sequence) -> None:
        """After a round: let others share the blocks that are full, give back those that only rejected nodes used."""
        self.prefixes.publish(seq)
        keep = self.pool.blocks_for(seq.cached + 1)
        self.pool.release(seq.blocks[keep:])
        del seq.blocks[keep:]

    def _admit(self) -> Work:
        """Start waiting sequences whose whole prefix fits, keeping one block free per running sequence."""
        admitted, copies = list[Sequence](), list[tuple[int, int]]()
        while self.waiting and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if seq.leader is not None and seq.leader in self.running and not seq.leader.decoding:
                break
            hit, total = self.prefixes.find(seq), self.pool.blocks_for(len(seq.tokens) + 1)
            owned = hit.last is not None and self.pool.is_idle(hit.last)
            if total - len(hit.shared) - owned + len(self.running) > self.prefixes.room(hit):
                break
            self.waiting.popleft()
            seq.leader = None
            if copied := self.prefixes.take(seq, hit):
                copies.append(copied)
            seq.blocks += self.pool.allocate(total - len(seq.blocks))
            self.running.append(seq)
            admitted.append(seq)
        return Work(admitted=tuple(admitted), copies=tuple(copies))

    def _chunks(self) -> tuple[PrefillChunk, ...]:
        waited_for = any(seq.decoding for seq in self.running)
        budget, chunks = self.prefill_budget if waited_for else self.max_num_batched_tokens, []
        for seq in self.running:
            if not seq.decoding and budget:
                stop = min(len(seq.tokens), seq.cached + budget)
                chunks.append(PrefillChunk(seq, seq.cached, stop))
                budget -= stop - seq.cached
        return tuple(chunks)

    def _decoders(self) -> tuple[Sequence, ...]:
        """Decoding sequences, each with a slot for its root; the latest arrivals are preempted if blocks run out."""
        ready: list[Sequence] = []
        for seq in [s for s in self.running if s.decoding]:
            while seq in self.running and self.extend(seq, 1) < 1:
                self._preempt(self.running[-1])
            if seq in self.running:
                ready.append(seq)
        return tuple(s for s in ready if s in self.running)

    def _preempt(self, seq: Sequence) -> None:
        """Give the sequence's blocks back; it waits first in line and later recomputes what is gone of its prefix."""
        self._release(seq)
        seq.cached = seq.draft_cached = 0
        self.running.remove(seq)
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def _release(self, seq: Sequence) -> None:
        """Of blocks that are kept the last is evicted first: without those before it, it is of no use."""
        self.prefixes.publish(seq, ended=True)
        self.pool.release(reversed(seq.blocks))
        seq.blocks, seq.published = [], 0
