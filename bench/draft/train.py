"""The training loop of the draft: whole passes over the target's text, checkpoints, and the written directory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from bench.demo_pair.optim import Optimizer

from . import data
from .net import Batch, Draft, agreement, loss_of

Counts = dict[int, tuple[int, int]]
TOGETHER = 4
"""Rows of a batch that a CPU takes at a time."""


@dataclass(frozen=True)
class Plan:
    """How the draft is trained."""

    steps: int
    rows: int = 12
    length: int = 512
    temperature: float = 0.8
    matrix_rate: float = 0.006
    rate: float = 1e-3
    warmup: int = 20
    cooldown: float = 0.6
    """Share of the steps in which the rates fall to nought."""
    save_every: int = 50
    seed: int = 0


def workers() -> tuple[int, int]:
    """This process's number among those that ``torchrun`` started, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def say(words: str) -> None:
    """Print, from the first worker only."""
    if workers()[0] == 0:
        print(words, flush=True)


def agreed(files: list[Path]) -> list[Path]:
    """The first worker's list of files, for all: more may appear between two workers' looks."""
    if workers()[1] > 1:
        dist.broadcast_object_list(box := [files])
        return box[0]
    return files


def share_gradients(draft: Draft) -> None:
    """Make every worker's gradients the mean of all."""
    count = workers()[1]
    if count > 1:
        gradients = [p.grad for p in draft.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients]) / count
        dist.all_reduce(flat)
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def collate(rows: list[data.Packed]) -> Batch:
    """Rows as a batch."""
    return Batch(**{name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]})


def factor(step: int, plan: Plan) -> float:
    """What the learning rates are multiplied by."""
    return min(1.0, (step + 1) / plan.warmup, (plan.steps - step) / max(1.0, plan.cooldown * plan.steps))


def batches(folder: Path, outputs: np.ndarray, vocabulary: int, plan: Plan, step: int) -> Iterator[Batch]:
    """Batches from ``step`` on, for ever; each pass reads the text anew, and so takes in what was written meanwhile."""
    rng, (mine, count) = np.random.default_rng([plan.seed, step]), workers()
    while True:
        texts = [t for t in data.read(agreed(data.shards(folder))) if not t.held]
        rows = data.pack(texts, outputs, vocabulary, plan.length, rng)
        order = rng.permutation(len(rows))
        tokens, own = sum(len(t.ids) for t in texts), sum(int(t.own.sum()) for t in texts)
        say(f"a pass over {tokens:,} tokens, of which the target wrote {own:,}")
        order = np.resize(order, max(len(order), plan.rows * count))
        for first in range(0, len(order) - plan.rows * count + 1, plan.rows * count):
            yield collate([rows[i] for i in order[first + mine : first + plan.rows * count : count]])


def train(draft: Draft, folder: Path, plan: Plan, device: str, kept: Path,
          write: Callable[[Draft, int, Counts], None]) -> float:  # fmt: skip
    """Train from the checkpoint, if there is one, and call ``write`` at each; returns the last mean loss."""
    draft.to(device).train()
    vocabulary, outputs = draft.net.shape.vocab_size, draft.output_ids.cpu().numpy()
    optimizer, start, mean = Optimizer(draft, plan.matrix_rate, plan.rate), 0, 0.0
    if kept.exists():
        state = torch.load(kept, map_location=device, weights_only=True)
        draft.net.load_state_dict(state["draft"], strict=False)
        optimizer.restore(state["optimizer"])
        start = state["step"]
    held = [t for t in data.read(data.shards(folder)) if t.held]
    check = [collate([row]) for row in data.pack(held[:48], outputs, vocabulary, plan.length, np.random.default_rng(0))]
    source, began = batches(folder, outputs, vocabulary, plan, start), time.monotonic()
    for step in range(start, plan.steps):
        loss = gradients(draft, next(source).to(device), plan.temperature, device)
        share_gradients(draft)
        optimizer.step(factor(step, plan))
        mean = loss if step == start else 0.9 * mean + 0.1 * loss
        if step % 10 == 0:
            rate = (step + 1 - start) * plan.rows * workers()[1] * plan.length / (time.monotonic() - began)
            say(f"step {step}/{plan.steps}: loss {mean:.3f}, {rate:.0f} tokens a second")
        if workers()[0] == 0 and ((step + 1) % plan.save_every == 0 or step + 1 == plan.steps):
            state = {"draft": draft.written(), "optimizer": optimizer.state(), "step": step + 1}
            torch.save(state, kept.with_suffix(".new"))
            os.replace(kept.with_suffix(".new"), kept)
            counts = agreement(draft, check, device)
            say(f"step {step + 1}: held-out agreement {table(counts)}")
            write(draft, step + 1, counts)
    return mean


def gradients(draft: Draft, batch: Batch, temperature: float, device: str) -> float:
    """Add up the gradients of a batch's mean loss, and return that loss. On a CPU a few rows go at a time.

    Their intermediate results stay in the caches, and in memory that the process has: twice as fast.
    """
    parts = batch.parts(TOGETHER if device == "cpu" else len(batch.ids))
    places, total = sum(int(part.used.sum()) for part in parts), 0.0
    for part in parts:
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(draft, part, temperature) / max(1, places)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def table(counts: Counts) -> str:
    """Agreement per kind of text, in a line."""
    names = [f"{kind} {how}" for how in ("greedy", "sampled") for kind in data.KINDS]
    return ", ".join(f"{names[k]} {same / places:.3f}" for k, (same, places) in sorted(counts.items()))
