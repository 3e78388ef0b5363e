"""The engine: one step takes sequences from plan to streamed text. Native decoding is one-node trees."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from lychee.kernels import commit_kv
from lychee.models.compiled import CompiledLlama
from lychee.models.kv_cache import KVCache
from lychee.models.layout import Rows
from lychee.models.llama import Llama

from .acceptance import Accepted, Rule, accept
from .checks import ContextError
from .controller import Controller
from .drafter import Drafter, ModelDrafter
from .inputs import SamplingBatch
from .metrics import Metrics
from .proposals import Proposals, undrafted
from .scheduler import PrefillChunk, Scheduler, Work
from .sequence import Sequence
from .streamer import Chunk, TokenLogprob, push
from .tree import TreeShape
from .trial import Trial
from .verifier import Verifier


class Engine:
    """A target model, a drafter and a controller over one block pool. `drafter` None decodes natively."""

    def __init__(
        self,
        target: Llama,
        kv: KVCache,
        scheduler: Scheduler,
        drafter: Drafter | None,
        controller: Controller,
        *,
        vocab: int,
        rule: Rule | None = None,
    ) -> None:
        self.target, self.kv, self.scheduler = CompiledLlama(target, kv), kv, scheduler
        self.drafter, self.controller = drafter, controller
        self.vocab, self.rule = vocab, rule or Rule()
        self.verifier = Verifier(self.target, vocab, self.rule)
        self.metrics = Metrics()
        self.trial = Trial()
        self.accelerated = False  # the step that is under way, or failed, may draft
        self._batch: SamplingBatch | None = None

    def check(self, seq: Sequence) -> None:
        """Raises ParameterError if the block pool could never hold the sequence. Any thread may ask."""
        pool = self.scheduler.pool
        if pool.blocks_for(seq.limit) > pool.num_blocks:
            raise ContextError(
                f"prompt and max_tokens make {seq.limit} tokens, which need {pool.blocks_for(seq.limit)} KV blocks of "
                f"{pool.block_size}; the pool has {pool.num_blocks}"
            )

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises ParameterError if the block pool could never hold it."""
        self.check(seq)
        seq.stats.arrived = time.perf_counter()
        self.scheduler.add(seq)

    def abort(self, seq: Sequence) -> None:
        """End a sequence now; its blocks go back."""
        if not seq.finished:
            seq.finish_reason = "abort"
            self._end(seq)

    def abort_all(self) -> None:
        for seq in (*self.scheduler.running, *self.scheduler.waiting):
            self.abort(seq)

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def step(self) -> list[Chunk]:
        """One prefill step, or one round: plan, propose, verify, accept, commit, stream."""
        with self._timed("step_s"):
            self.accelerated = False
            work = self.scheduler.next()
            self.metrics.preemptions = self.scheduler.num_preemptions
            self._begin(work)
            if work.chunks:
                return self._prefill(work.chunks)
            return self._round(work.decode) if work.decode else []

    def _begin(self, work: Work) -> None:
        """Count what admitted sequences find in the prefix cache, and make the copies that they write in."""
        for seq in work.admitted:
            self.metrics.prefix_cache_queries += len(seq.tokens)
            self.metrics.prefix_cache_hits += seq.cached
            if not seq.num_emitted:
                seq.stats.cached_tokens = seq.cached
        for source, destination in work.copies:
            for kv in self._caches:
                kv.copy_block(source, destination)

    def _prefill(self, chunks: tuple[PrefillChunk, ...]) -> list[Chunk]:
        """Cache prompt tokens; a sequence whose last one is among them emits its first token."""
        done = [i for i, c in enumerate(chunks) if c.stop == len(c.seq.tokens)]
        ends = np.cumsum([c.stop - c.start for c in chunks]) - 1
        with self._timed("verify_s"):
            rows = Rows.prefill(
                tokens=[c.seq.tokens[c.start : c.stop] for c in chunks],
                context_lens=[c.start for c in chunks],
                block_tables=[c.seq.blocks for c in chunks],
                block_size=self.kv.block_size,
                logit_rows=ends[done].tolist(),
            )
            logits = self.target.forward(rows)
        for chunk in chunks:
            # A last token's KV is stored too, but it is a root now, and those count from their round's commit on.
            chunk.seq.cached = min(chunk.stop, len(chunk.seq.tokens) - 1)
            self.scheduler.prefixes.publish(chunk.seq)
        if not done:
            return []
        sampling = self._sampling(tuple(chunks[i].seq for i in done))
        proposals = undrafted(sampling.seqs)
        with self._timed("verify_s"):
            accepted = accept(proposals, logits, sampling, self.vocab, self.rule)
        return self._emit(sampling, proposals, logits, accepted, in_round=False)

    def _round(self, seqs: tuple[Sequence, ...]) -> list[Chunk]:
        planning = time.perf_counter()
        self.accelerated = self.drafter is not None and self.trial.drafts and any(seq.speculates for seq in seqs)
        sampling = self._sampling(seqs)
        shapes = self._plan(seqs)
        begin = time.perf_counter()
        if self.drafter is not None and any(shape.depth for shape in shapes):
            proposals = self.drafter.propose(sampling, shapes, self.controller.goes_on)
            if behind := sum(s.depth > 0 == t.shape.depth for s, t in zip(shapes, proposals.trees, strict=True)):
                self.metrics.native_rounds["behind"] += behind
        else:
            proposals = undrafted(seqs)
        drafted = time.perf_counter()
        logits, accepted = self.verifier.run(self._rows(seqs, proposals), proposals, sampling)
        verified = time.perf_counter()
        self.metrics.draft_s += drafted - begin
        self.metrics.verify_s += verified - drafted
        chunks = self._emit(sampling, proposals, logits, accepted, in_round=True)
        parts = drafted - begin, verified - drafted, time.perf_counter() - verified + begin - planning
        self.controller.timed(proposals.trees, *(1e3 * seconds for seconds in parts))
        if self.trial.running:
            emitted = [len(chunk.token_ids) for seq, chunk in zip(seqs, chunks, strict=True) if seq.speculates]
            self.trial.add(self.accelerated, len(emitted), sum(emitted), time.perf_counter() - planning)
        return chunks

    @property
    def shapes(self) -> Seq[TreeShape]:
        """What rounds may be of, less what a limit cuts."""
        return [TreeShape.chain(0)] if self.drafter is None else self.controller.shapes

    def _plan(self, seqs: tuple[Sequence, ...]) -> list[TreeShape]:
        """The controller's shapes, cut to the token limit, the draft's context and the free blocks."""
        native = self.metrics.native_rounds
        if self.drafter is None:
            native["no_draft"] += len(seqs)
            return [TreeShape.chain(0)] * len(seqs)
        if not self.accelerated:
            for seq in seqs:
                native["control" if seq.speculates else "off"] += 1
            return [TreeShape.chain(0)] * len(seqs)
        planned = iter(self.controller.plan([seq.seq_id for seq in seqs if seq.speculates]))
        shapes = []
        for seq in seqs:
            wanted = next(planned) if seq.speculates else TreeShape.chain(0)
            if not wanted.depth:  # its root has a slot already
                shapes.append(wanted)
                native["planned" if seq.speculates else "off"] += 1
                continue
            depth = min(seq.limit - len(seq.tokens) - 1, self.drafter.max_len - seq.cached)
            within = wanted if wanted.depth <= depth else self._within(wanted, depth)
            shape = within.cut(within.depth, self.scheduler.extend(seq, within.num_nodes))
            shapes.append(shape)
            if not shape.depth:
                native["blocks" if within.depth else "limit"] += 1
        return shapes

    def _within(self, wanted: TreeShape, depth: int) -> TreeShape:
        """Of at most that depth. A shape that is planned anyway, if there is one, since that has been lowered."""
        fitting = [shape for shape in self.shapes if 0 < shape.depth <= depth and shape.num_nodes <= wanted.num_nodes]
        if not fitting:
            return wanted.cut(depth, wanted.num_nodes)
        return max(fitting, key=lambda shape: (shape.depth, shape.num_nodes))

    def _rows(self, seqs: tuple[Sequence, ...], proposals: Proposals) -> Rows:
        """The live nodes, after their sequences' contexts."""
        nodes = proposals.nodes
        where = [seq.cached for seq in seqs], [seq.blocks for seq in seqs], self.kv.block_size
        return Rows.of(nodes.layout, proposals.tokens[nodes.rows], *where)

    def _emit(
        self, sampling: SamplingBatch, proposals: Proposals, logits: Tensor, accepted: Accepted, *, in_round: bool
    ) -> list[Chunk]:
        """Commit the accepted paths' KV, stream, and end what has ended."""
        self._commit(sampling, accepted)
        chunks, first = [], proposals.nodes.layout.cu_seqlens_q.tolist()
        for i, (seq, tree) in enumerate(zip(sampling.seqs, proposals.trees, strict=True)):
            logprobs = self._logprobs(seq, logits, first[i], accepted.rows[i], accepted.tokens[i])
            chunk = push(seq, accepted.tokens[i], logprobs)
            chunks.append(chunk)
            seq.stats.first_token = seq.stats.first_token or time.perf_counter()
            if in_round:
                path, emitted = accepted.nodes[i], len(chunk.token_ids)
                seq.stats.add_round(tree.shape, path, emitted, seq.finished, tree.levels)
                if self.accelerated:
                    self.controller.observe(seq.seq_id, tree, path, emitted)
            else:
                seq.stats.emitted += 1
            if tree.shape.num_nodes > 1:
                # The draft has run every node but the leaves: one that ends the path lacks draft KV.
                path = accepted.nodes[i]
                is_leaf = len(path) > tree.depth or path[-1] not in tree.shape.parents
                seq.draft_cached = seq.cached + len(path) - is_leaf
            seq.cached = len(seq.tokens) - 1
            if seq.finished:
                self._end(seq)
            else:
                self.scheduler.settle(seq)
        return chunks

    def _commit(self, sampling: SamplingBatch, accepted: Accepted) -> None:
        """Move accepted nodes' KV, of both models, to the slots of their positions. A trunk path is in place."""
        if all(path == tuple(range(len(path))) for path in accepted.nodes):
            return
        seqs, device = sampling.seqs, sampling.device
        width = max(len(seq.blocks) for seq in seqs)
        tables = np.array([seq.blocks + [-1] * (width - len(seq.blocks)) for seq in seqs], np.int32)
        lens = np.array([seq.cached for seq in seqs], np.int32)
        where = torch.from_numpy(lens).to(device), torch.from_numpy(tables).to(device)
        longest = max(map(len, accepted.nodes))
        paths = np.array([[*path, *[-1] * (longest - len(path))] for path in accepted.nodes], np.int32)
        kept = torch.from_numpy(paths).to(device)
        for kv in self._caches:
            commit_kv(kv.storage, kept, *where, kv.block_size)

    @property
    def _caches(self) -> list[KVCache]:
        """Of both models, over the same blocks."""
        return [self.kv, self.drafter.kv] if isinstance(self.drafter, ModelDrafter) else [self.kv]

    def _end(self, seq: Sequence) -> None:
        seq.stats.ended = time.perf_counter()
        self.scheduler.finish(seq)
        self.controller.forget(seq.seq_id)
        self.metrics.add(seq.stats)

    def _logprobs(
        self, seq: Sequence, logits: Tensor, first_row: int, path: tuple[int, ...], tokens: tuple[int, ...]
    ) -> tuple[TokenLogprob, ...] | None:
        """Log-probabilities of the emitted tokens under the target's raw logits."""
        if seq.params.logprobs is None:
            return None
        rows = logits[[first_row + node for node in path], : self.vocab].log_softmax(-1)
        top = rows.topk(min(seq.params.logprobs, self.vocab), -1)
        values, ids = top.values.tolist(), top.indices.tolist()
        chosen = rows[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()
        return tuple(
            TokenLogprob(token, logprob, dict(zip(ids[j], values[j], strict=True)))
            for j, (token, logprob) in enumerate(zip(tokens, chosen, strict=True))
        )

    def _sampling(self, seqs: tuple[Sequence, ...]) -> SamplingBatch:
        """Sampling tensors of these sequences; kept while the batch stays and no counts change."""
        old = self._batch
        if old is None or old.seqs != seqs or old.params.token_counts is not None:
            self._batch = SamplingBatch.of(seqs, self.vocab, self.kv.storage.device)
        assert self._batch is not None
        return self._batch

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Add the wall time of the block to a phase of the metrics."""
        start = time.perf_counter()
        yield
        setattr(self.metrics, name, getattr(self.metrics, name) + time.perf_counter() - start)
