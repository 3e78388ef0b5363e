"""The scheduler: which sequences the next step works on. Requests join and leave between rounds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .blocks import BlockPool
from .sequence import Sequence


@dataclass(frozen=True)
class PrefillChunk:
    """Prompt tokens [start, stop) of a sequence to prefill."""

    seq: Sequence
    start: int
    stop: int


@dataclass(frozen=True)
class Work:
    """One step: prefill chunks or decoding sequences, never both."""

    chunks: tuple[PrefillChunk, ...] = ()
    decode: tuple[Sequence, ...] = ()


class Scheduler:
    """First come, first served. Prefill steps alternate with decode rounds while both have work."""

    def __init__(self, pool: BlockPool, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.pool, self.max_num_seqs, self.max_num_batched_tokens = pool, max_num_seqs, max_num_batched_tokens
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
        if not (self._prefilled_last and any(s.decoding for s in self.running)):
            self._admit()
            if chunks := self._chunks():
                self._prefilled_last = True
                return Work(chunks=chunks)
        self._prefilled_last = False
        return Work(decode=self._decoders())

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

    def trim(self, seq: Sequence) -> None:
        """Give back the blocks that only rejected nodes used."""
        keep = self.pool.blocks_for(seq.cached + 1)
        self.pool.release(seq.blocks[keep:])
        del seq.blocks[keep:]

    def _admit(self) -> None:
        """Start waiting sequences whose whole prefix fits, keeping one block free per running sequence."""
        while self.waiting and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if seq.leader is not None and seq.leader in self.running and not seq.leader.decoding:
                return
            shared = self._shareable(seq)
            needed = self.pool.blocks_for(len(seq.tokens) + 1) - shared
            reserve = 0 if not self.running else len(self.running)
            if needed + reserve > self.pool.num_free:
                return
            self.waiting.popleft()
            if shared:
                assert seq.leader is not None
                seq.blocks = self.pool.share(seq.leader.blocks[:shared])
                seq.cached = shared * self.pool.block_size
                seq.draft_cached = min(seq.cached, seq.leader.draft_cached)
            seq.leader = None
            seq.blocks += self.pool.allocate(needed)
            self.running.append(seq)

    def _shareable(self, seq: Sequence) -> int:
        """Full prompt blocks that the leader holds; one prompt token at least is left to compute."""
        leader = seq.leader
        if leader is None or leader not in self.running or not leader.decoding:
            return 0
        return (seq.num_prompt - 1) // self.pool.block_size

    def _chunks(self) -> tuple[PrefillChunk, ...]:
        budget, chunks = self.max_num_batched_tokens, []
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
        """Give the sequence's blocks back; it waits first in line and recomputes its prefix later."""
        self._release(seq)
        seq.cached = seq.draft_cached = 0
        self.running.remove(seq)
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def _release(self, seq: Sequence) -> None:
        self.pool.release(seq.blocks)
        seq.blocks = []
