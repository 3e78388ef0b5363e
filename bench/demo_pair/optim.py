"""Muon for the matrices inside the layers, Adam for everything else, and the learning-rate schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def orthogonalized(g: Tensor, rounds: int = 4) -> Tensor:
    """``g`` with its singular values pushed towards one (Newton-Schulz iteration)."""
    x = (g / (g.norm() + 1e-7)).bfloat16()
    wide = x if x.shape[0] <= x.shape[1] else x.T
    for _ in range(rounds):
        a = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * a + 2.0315 * (a @ a)) @ wide
    out: Tensor = wide if x.shape[0] <= x.shape[1] else wide.T
    return out.to(g.dtype)


class Optimizer:
    """Muon on the layers' matrices and Adam on embedding and norms; one ``step`` per batch."""

    def __init__(self, model: nn.Module, matrix_rate: float = 0.02, rate: float = 3e-3, decay: float = 0.05) -> None:
        self.matrix_rate, self.rate, self.decay = matrix_rate, rate, decay
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n]
        self.others = [p for n, p in named if p.ndim != 2 or "embed" in n]
        self.mean = [torch.zeros_like(p) for p in self.matrices + self.others]
        self.square = [torch.zeros_like(p) for p in self.others]
        self.steps = 0

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Apply the gradients with the learning rates times ``factor``, then drop the gradients."""
        self.steps += 1
        torch.nn.utils.clip_grad_norm_(self.matrices + self.others, 1.0)
        for p, mean in zip(self.matrices, self.mean[: len(self.matrices)], strict=True):
            assert p.grad is not None
            mean.lerp_(p.grad, 0.05)
            rate = self.matrix_rate * factor
            p.mul_(1 - rate * self.decay)
            tall = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
            p.add_(orthogonalized(p.grad.lerp(mean, 0.95)), alpha=-rate * tall)
        for p, mean, square in zip(self.others, self.mean[len(self.matrices) :], self.square, strict=True):
            assert p.grad is not None
            mean.lerp_(p.grad, 0.1)
            square.lerp_(p.grad * p.grad, 0.05)
            size = (square / (1 - 0.95**self.steps)).sqrt_().add_(1e-8)
            p.addcdiv_(mean / (1 - 0.9**self.steps), size, value=-self.rate * factor)
        for p in self.matrices + self.others:
            p.grad = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        return {"mean": self.mean, "square": self.square, "steps": self.steps}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up a state that ``state`` gave."""
        for mine, kept in zip(self.mean + self.square, state["mean"] + state["square"], strict=True):
            mine.copy_(kept)
        self.steps = state["steps"]


def schedule(step: int, total: int, cooldown: float, warmup: int = 30) -> float:
    """Warm up, stay, then fall in a line towards nought over the last ``cooldown`` share of the steps."""
    return min(1.0, (step + 1) / warmup, (total - step) / max(1.0, cooldown * total))
