"""The target, fast at many rows of differing lengths: bf16 products, a fixed KV cache, one new token a row and step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.demo_pair.model import Cache, Llama, rotate

from .attention import attend

KEPT = 24
"""How many of the likeliest tokens, with their log-probabilities, are kept of every distribution."""


@dataclass(frozen=True)
class Fused:
    """One layer's matrices, those that read the same input as one."""

    norms: tuple[Tensor, Tensor]
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor


class Decoder:
    """Keys and values of ``rows`` rows of at most ``positions`` tokens."""

    def __init__(self, model: Llama, rows: int, positions: int) -> None:
        s = self.shape = model.shape
        self.cos, self.sin, self.eps = model.cos, model.sin, s.rms_norm_eps
        self.model = model.to(torch.bfloat16)
        self.model.cos, self.model.sin = self.cos, self.sin
        self.embedding = self.model.embedding
        self.norm = self.model.model["norm"].weight.float()  # type: ignore[union-attr]
        self.layers = [fused(layer) for layer in self.model.model["layers"]]  # type: ignore[arg-type, union-attr]
        blank = self.embedding.new_zeros(rows, s.num_key_value_heads, positions, s.head_dim)
        self.cache: Cache = [(blank.clone(), blank.clone()) for _ in self.layers]

    @torch.no_grad()
    def prefill(self, rows: list[int], prompts: list[list[int]], together: int = 512) -> None:
        """Read the prompts into the rows' cache, those of like length together."""
        s, order = self.shape, sorted(range(len(rows)), key=lambda i: len(prompts[i]))
        while order:
            longest = max(1, len(prompts[order[-1]]))
            now = [order.pop() for _ in range(min(len(order), max(1, together // longest)))]
            ids = torch.tensor([prompts[i] + [0] * (longest - len(prompts[i])) for i in now], device=self.cos.device)
            blank = self.embedding.new_zeros(len(now), s.num_key_value_heads, longest, s.head_dim)
            fresh: Cache = [(blank.clone(), blank.clone()) for _ in self.layers]
            self.model.hidden(ids, fresh)
            at = torch.tensor([rows[i] for i in now], device=self.cos.device)
            for (keys, values), (k, v) in zip(self.cache, fresh, strict=True):
                keys[at, :, :longest], values[at, :, :longest] = k, v

    @torch.no_grad()
    def step(self, ids: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest tokens after ``ids`` at the positions ``at``, a row each, and their log-probabilities."""
        s, rows = self.shape, torch.arange(len(ids), device=ids.device)
        turn = self.cos[at][:, None, None], self.sin[at][:, None, None]
        sizes = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
        x = F.embedding(ids, self.embedding).float()
        for layer, (keys, values) in zip(self.layers, self.cache, strict=True):
            y = F.rms_norm(x, x.shape[-1:], layer.norms[0], self.eps).bfloat16()
            q, k, v = F.linear(y, layer.qkv).split((sizes[0], sizes[1], sizes[1]), -1)
            q = rotate(q.view(len(ids), s.num_key_value_heads, -1, s.head_dim), *turn)
            k = rotate(k.view(len(ids), s.num_key_value_heads, 1, s.head_dim), *turn).bfloat16()
            keys[rows, :, at], values[rows, :, at] = k[:, :, 0], v.view(len(ids), s.num_key_value_heads, s.head_dim)
            x = x + F.linear(attend(q, keys, values, at).bfloat16().view(len(ids), -1), layer.o)
            y = F.rms_norm(x, x.shape[-1:], layer.norms[1], self.eps).bfloat16()
            gate, up = F.linear(y, layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return self.likeliest(F.rms_norm(x, x.shape[-1:], self.norm, self.eps).bfloat16())

    def likeliest(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The ``KEPT`` best by bf16 logits; their own logits are computed again in float32, which bf16 would round."""
        rough = F.linear(hidden, self.embedding)
        most = rough.amax(-1, keepdim=True)
        total = (rough - most).exp_().sum(-1, keepdim=True, dtype=torch.float32).log_() + most
        ids = top(rough, min(KEPT, rough.shape[-1]))
        exact = (self.embedding[ids].float() @ hidden.float()[:, :, None]).squeeze(-1)
        exact, order = exact.sort(-1, descending=True)
        return ids.gather(-1, order), exact - total


def top(values: Tensor, count: int, span: int = 64) -> Tensor:
    """The indices of the greatest values of each row: first the spans that hold them, then within those."""
    rows, width = values.shape
    if width % span or width // span < count:
        return values.topk(count).indices
    spans = values.view(rows, -1, span)
    best = spans.amax(-1).topk(count).indices
    inside = spans.gather(1, best[:, :, None].expand(-1, -1, span)).flatten(1).topk(count).indices
    return best.gather(1, inside // span) * span + inside % span


def fused(layer: torch.nn.Module) -> Fused:
    """A layer's weights, put together."""
    a, m = layer.self_attn, layer.mlp
    qkv = torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight])
    norms = layer.input_layernorm.weight.float(), layer.post_attention_layernorm.weight.float()
    return Fused(norms, qkv, a.o_proj.weight, torch.cat([m.gate_proj.weight, m.up_proj.weight]), m.down_proj.weight)
