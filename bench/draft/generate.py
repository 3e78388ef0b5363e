"""The target's own text, many rows at once: a row that is done makes place for the next prompt."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from .data import Writer
from .decoder import Decoder
from .prompts import Prompt, Turns
from .rows import Limits, Row


def generate(decoder: Decoder, prompts: Iterator[Prompt], out: Writer, ends: list[int], turns: Turns, limits: Limits,
             stop: Path, seconds: float, seed: int) -> None:  # fmt: skip
    """Write text for the prompts until there are none, the time is up or the file ``stop`` appears."""
    where, slots = decoder.embedding.device, decoder.cache[0][0].shape[0]
    noise = torch.Generator(where).manual_seed(seed)
    rows: list[Row | None] = [None] * slots
    began, written = time.monotonic(), 0
    dry = False
    for step in range(1 << 62):
        free = [i for i, row in enumerate(rows) if row is None]
        if not dry and len(free) >= max(1, slots // 12):
            fresh = [Row(p, list(p.ids)) for _, p in zip(free, prompts, strict=False)]
            dry = len(fresh) < len(free)
            if fresh:
                decoder.prefill(free[: len(fresh)], [row.ids[:-1] for row in fresh])
            for i, begun in zip(free, fresh, strict=False):
                rows[i] = begun
        live = [row for row in rows if row is not None]
        if not live or time.monotonic() - began > seconds or (step % 16 == 0 and stop.exists()):
            break
        ids = torch.tensor([row.ids[-1] if row else 0 for row in rows], device=where)
        at = torch.tensor([len(row.ids) - 1 if row else 0 for row in rows], device=where)
        heat = torch.tensor([row.temperature() if row and not row.given else 0.0 for row in rows], device=where)
        best, logprobs = decoder.step(ids, at)
        gumbel = -torch.empty(logprobs.shape, device=where).exponential_(generator=noise).log()
        drawn = best.gather(-1, (logprobs + heat[:, None] * gumbel).argmax(-1, keepdim=True))[:, 0].tolist()
        for i, (token, tops, logs) in enumerate(zip(drawn, best.tolist(), logprobs.tolist(), strict=True)):
            row = rows[i]
            if row is None:
                continue
            written += not row.given
            if row.push(token, (tops, logs), ends, turns, limits):
                out.add(row)
                rows[i] = None
        if step % 50 == 0:
            rate = written / (time.monotonic() - began)
            print(f"step {step}: {written:,} tokens, {rate:.0f} a second, {len(live)} rows", flush=True)
    for row in rows:  # what is unfinished is of use as well
        if row is not None and len(row.own) > 8:
            out.add(row)
    out.flush()
    print(f"{written:,} tokens in {time.monotonic() - began:.0f} s", flush=True)
