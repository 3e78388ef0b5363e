"""The training loop of both models: by plain cross entropy, or by distillation from a teacher."""

from __future__ import annotations

import argparse
import os

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from . import tokenizer
from .batches import CONTEXT, ROWS, batches, held_windows
from .files import save
from .model import Llama
from .optim import Optimizer, schedule


def loss_of(model: Llama, teacher: Llama | None, temperature: float, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy with the text, or, given a teacher, its divergence from the teacher at a temperature."""
    logits = model(x).flatten(0, 1).float()
    if teacher is None:
        return F.cross_entropy(logits, y.flatten())
    with torch.no_grad():
        wanted = (teacher(x).flatten(0, 1).float() / temperature).log_softmax(-1)
    return F.kl_div((logits / temperature).log_softmax(-1), wanted, reduction="batchmean", log_target=True)


def train(o: argparse.Namespace, name: str, model: Llama, tokens: float, data: dict[str, np.ndarray],
          held: dict[str, np.ndarray], mix: dict[str, float], teacher: Llama | None = None) -> None:  # fmt: skip
    """Train ``model`` for a number of tokens, from its checkpoint if there is one, and write its directory."""
    model.to(o.device).train()
    optimizer = Optimizer(model)
    total, start, kept = int(tokens) // (ROWS * CONTEXT), 0, o.work / f"{name}.pt"
    if kept.exists():
        state = torch.load(kept, map_location=o.device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.restore(state["optimizer"])
        start = state["step"]
    compiled = torch.compile(loss_of, dynamic=False) if o.compile else loss_of
    batch, mean = batches(data, mix, o.seed), 0.0
    plain = int(o.plain * total)
    bar = tqdm(range(start, total), desc=name, initial=start, total=total, unit="step", mininterval=5)
    for step in bar:
        x, y = (t.to(o.device) for t in batch(step))
        if step < (1 - o.long) * total:
            x, y = x.view(2 * ROWS, -1), y.view(2 * ROWS, -1)
        with torch.autocast(o.device, torch.bfloat16):
            loss = compiled(model, teacher if step >= plain else None, o.temperature, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(schedule(step, total, o.cooldown))
        if step % 10 == 0:
            mean = loss.item() if step in (start, plain) else 0.9 * mean + 0.1 * loss.item()
            bar.set_postfix_str(f"loss {mean:.3f}")
        if (step + 1) % o.save_every == 0 or step + 1 == total:
            state = {"model": model.state_dict(), "optimizer": optimizer.state(), "step": step + 1}
            torch.save(state, kept.with_suffix(".new"))
            os.replace(kept.with_suffix(".new"), kept)
            losses = " ".join(f"{kind} {held_loss(model, ids, o.device):.3f}" for kind, ids in held.items())
            tqdm.write(f"{name} step {step + 1}/{total}: loss {mean:.3f}, held out {losses}")
    save(model, o.out / name)
    tokenizer.install(o.tokenizer, o.out / name)


@torch.no_grad()
def held_loss(model: Llama, ids: np.ndarray, device: str, windows: int = 8) -> float:
    """Cross entropy per token over windows spread through held-out text."""
    x = held_windows(ids, windows).to(device)
    with torch.autocast(device, torch.bfloat16):
        logits = model(x[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), x[:, 1:].flatten()).item()
