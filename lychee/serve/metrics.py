"""What /metrics shows: the engine's own counts, and what its readers saw, under vLLM's names after `lychee:`."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

from lychee.runtime.streamer import Chunk

from .async_engine import AsyncEngine
from .channel import CHANNELS
from .guard import Guard
from .job import Job

FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
WHOLE = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    """Counts of seconds, by the bucket that is the first they fit in."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.sum += seconds * times

    def cumulative(self) -> list[tuple[str, float]]:
        found, total = [], 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            total += count
            found.append(("+Inf" if math.isinf(bound) else str(bound), float(total)))
        return found


@dataclass
class ChannelMetrics:
    """What readers of one channel saw. A token's latency is its share of the time since the last chunk."""

    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST))
    between_tokens: Histogram = field(default_factory=lambda: Histogram(BETWEEN))
    whole: Histogram = field(default_factory=lambda: Histogram(WHOLE))
    finished: Counter[str] = field(default_factory=Counter)  # completions by reason
    prompt_tokens: int = 0
    generated_tokens: int = 0


class ServiceMetrics:
    """The event loop's own; `engine` and `guard` are set once there are any."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.engine: AsyncEngine | None = None
        self.guard: Guard | None = None
        self.channels: defaultdict[str, ChannelMetrics] = defaultdict(ChannelMetrics)
        self._last: dict[tuple[Job, int], float] = {}
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def observe(self, job: Job, index: int, chunk: Chunk) -> None:
        """A chunk has come for a reader."""
        now, channel, stats = time.perf_counter(), self.channels[job.channel], job.seqs[index].stats
        last = self._last.get((job, index))
        if last is None:
            channel.first_token.observe(now - stats.arrived)
        elif chunk.token_ids:
            channel.between_tokens.observe((now - last) / len(chunk.token_ids), len(chunk.token_ids))
        self._last[job, index] = now
        channel.generated_tokens += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            channel.finished[chunk.finish_reason] += 1
            channel.whole.observe(now - stats.arrived)

    def closed(self, job: Job, failed: str | None) -> None:
        """A job's reader is done with it; `failed` is why it has not all its completions."""
        channel = self.channels[job.channel]
        channel.prompt_tokens += sum(seq.num_prompt for seq in job.seqs if seq.sample_idx == 0)
        for index, seq in enumerate(job.seqs):
            self._last.pop((job, index), None)
            if failed and (seq.finish_reason or "abort") == "abort":
                channel.finished[failed] += 1

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._readers()
        if self.engine is not None:
            yield from self._engine(self.engine)
        if self.guard is not None:
            yield from self._guard(self.guard)

    def _readers(self) -> Iterator[Metric]:
        finished = self._counter("request_success", "Completions that ended, by reason.", "finished_reason")
        prompts = self._counter("prompt_tokens", "Tokens of prompts.")
        tokens = self._counter("generation_tokens", "Tokens generated.")
        first = self._histogram("time_to_first_token_seconds", "From arrival to the first token.")
        between = self._histogram("inter_token_latency_seconds", "Between tokens of a completion.")
        whole = self._histogram("e2e_request_latency_seconds", "From arrival to the end.")
        for name in CHANNELS:
            channel, labels = self.channels[name], [self.model_name, name]
            prompts.add_metric(labels, channel.prompt_tokens)
            tokens.add_metric(labels, channel.generated_tokens)
            for reason in sorted({"stop", "length", "abort", "error", *channel.finished}):
                finished.add_metric([*labels, reason], channel.finished[reason])
            for family, histogram in (
                (first, channel.first_token),
                (between, channel.between_tokens),
                (whole, channel.whole),
            ):
                family.add_metric(labels, histogram.cumulative(), histogram.sum)
        yield from (finished, prompts, tokens, first, between, whole)

    def _engine(self, engine: AsyncEngine) -> Iterator[Metric]:
        """Counts of drafts are over completions that have ended. A native sequence has none."""
        waiting = Counter(job.channel for job in engine.jobs for _ in job.waiting)
        running = Counter(job.channel for job in engine.jobs for _ in job.unfinished - job.waiting)
        for name, about, by in (
            ("num_requests_running", "Completions that have begun and not ended.", running),
            ("num_requests_waiting", "Completions that wait for their first token.", waiting),
        ):
            gauge = GaugeMetricFamily(f"lychee:{name}", about, labels=["model_name", "channel"])
            for channel in CHANNELS:
                gauge.add_metric([self.model_name, channel], by[channel])
            yield gauge
        restarts = CounterMetricFamily("lychee:engine_restarts", "Engines that failed.", labels=["model_name"])
        restarts.add_metric([self.model_name], engine.restarts)
        yield restarts
        if engine.failing:
            return
        pool, metrics = engine.engine.scheduler.pool, engine.engine.metrics
        usage = GaugeMetricFamily("lychee:kv_cache_usage_perc", "KV blocks in use, 1 being all.", labels=["model_name"])
        usage.add_metric([self.model_name], 1 - pool.num_free / pool.num_blocks)
        yield usage
        for name, about, value in (
            ("num_preemptions", "Preemptions.", metrics.preemptions),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", metrics.prefix_cache_queries),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", metrics.prefix_cache_hits),
        ):
            counter = CounterMetricFamily(f"lychee:{name}", about, labels=["model_name"])
            counter.add_metric([self.model_name], value)
            yield counter
        labels = [self.model_name, "speculative"]
        for name, about, value in (
            ("num_drafts", "Rounds that drafted.", metrics.drafted_at[0]),
            ("num_draft_tokens", "Tokens drafted.", metrics.drafted),
            ("num_accepted_tokens", "Drafted tokens that were accepted.", metrics.accepted),
        ):
            counter = self._counter(f"spec_decode_{name}", about)
            counter.add_metric(labels, value)
            yield counter
        by_depth = self._counter("spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by depth.", "position")
        deepest = max((i for i, drafted in enumerate(metrics.drafted_at) if drafted), default=-1)
        for depth in range(deepest + 1):
            by_depth.add_metric([*labels, str(depth)], metrics.accepted_at[depth])
        native = self._counter("native_rounds", "Sequences' rounds that drafted nothing, by reason.", "reason")
        for reason, count in sorted(metrics.native_rounds.copy().items()):
            channel = "native" if reason in ("off", "no_draft") else "speculative"
            native.add_metric([self.model_name, channel, reason], count)
        yield from (by_depth, native)

    def _guard(self, guard: Guard) -> Iterator[Metric]:
        verdict, name = guard.verdict, "lychee:speculation"
        share = GaugeMetricFamily(f"{name}_share", "Of users that are drafted for.", labels=["model_name"])
        share.add_metric([self.model_name], guard.channel.share)
        about = "Tokens per second with drafts over those without, while both channels are compared."
        ratio = GaugeMetricFamily(f"{name}_goodput_ratio", about, labels=["model_name"])
        if verdict.ratio is not None:
            ratio.add_metric([self.model_name], verdict.ratio)
        taken = CounterMetricFamily(
            f"{name}_rollbacks", "Times the share was taken back.", labels=["model_name", "cause"]
        )
        for cause in ("goodput", "errors"):
            taken.add_metric([self.model_name, cause], guard.rollbacks[cause])
        guarded = InfoMetricFamily(f"{name}_guard", "What the comparison of the channels says.", labels=["model_name"])
        guarded.add_metric([self.model_name], {"state": verdict.state, "reason": verdict.reason})
        yield from (share, ratio, taken, guarded)

    def _counter(self, name: str, about: str, *more: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"lychee:{name}", about, labels=["model_name", "channel", *more])

    def _histogram(self, name: str, about: str) -> HistogramMetricFamily:
        return HistogramMetricFamily(f"lychee:{name}", about, labels=["model_name", "channel"])
