"""A small Llama for training: RMSNorm, rotary positions, SwiGLU, grouped-query attention, tied embedding.

Module names are those of Hugging Face checkpoints, so ``state_dict()`` is the file that is written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of every layer, allocated for the whole text: (rows, KV heads, positions, head size)."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, under the names that ``config.json`` has for them."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int = 4096
    max_position_embeddings: int = 512
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0


TARGET = Shape(384, 1056, 4, 6, 2, 64)
DRAFT = Shape(128, 224, 2, 4, 2, 32)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the two halves of each head against each other by the angle of its position."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Attention(nn.Module):
    """Grouped-query attention, as two batched products: faster on a CPU than the fused kernel at these lengths."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.heads, self.kv, self.size = s.num_attention_heads, s.num_key_value_heads, s.head_dim
        self.q_proj = nn.Linear(s.hidden_size, self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(s.hidden_size, self.kv * self.size, bias=False)
        self.v_proj = nn.Linear(s.hidden_size, self.kv * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, s.hidden_size, bias=False)

    def forward(self, y: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor, cache: Cache | None, i: int) -> Tensor:
        (rows, new, _), at = y.shape, mask.shape[-1] - mask.shape[-2]
        q = self.q_proj(y).view(rows, new, self.heads, self.size).transpose(1, 2)
        k = self.k_proj(y).view(rows, new, self.kv, self.size).transpose(1, 2)
        v = self.v_proj(y).view(rows, new, self.kv, self.size).transpose(1, 2)
        q, k = rotate(q, *turn).to(v.dtype), rotate(k, *turn).to(v.dtype)
        if cache is not None:
            keys, values = cache[i]
            keys[:, :, at : at + new], values[:, :, at : at + new] = k, v
            k, v = keys[:, :, : at + new].to(q.dtype), values[:, :, : at + new].to(q.dtype)
        groups, share = rows * self.kv, self.heads // self.kv
        k, v = k.reshape(groups, -1, self.size), v.reshape(groups, -1, self.size)
        scores = torch.bmm(q.reshape(groups, share * new, self.size), k.transpose(1, 2))
        scores = scores.view(groups, share, new, -1).float() * self.size**-0.5 + mask
        weights = scores.softmax(-1).to(v.dtype).view(groups, share * new, -1)
        mixed = torch.bmm(weights, v).view(rows, self.heads, new, self.size)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, new, -1))
        return out


class Mlp(nn.Module):
    """The gated feed-forward half of a layer."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.up_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.down_proj = nn.Linear(s.intermediate_size, s.hidden_size, bias=False)

    def forward(self, y: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))
        return out


class Layer(nn.Module):
    """One layer; both of its outputs start at nought, so that a fresh model begins as its embedding."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = nn.RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.mlp = Mlp(s)
        for name, p in self.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                nn.init.zeros_(p)
            elif p.ndim == 2:
                nn.init.normal_(p, std=0.7 * s.hidden_size**-0.5)


class Llama(nn.Module):
    """The whole model: token ids in, logits out."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
        nn.init.normal_(embed.weight, std=0.02)
        layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.model = nn.ModuleDict({"embed_tokens": embed, "layers": layers, "norm": norm})
        speed = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angle = torch.outer(torch.arange(shape.max_position_embeddings).float(), speed).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids: Tensor, cache: Cache | None = None, at: int = 0) -> Tensor:
        """Logits of every position; with a cache, ``ids`` stand at the positions from ``at`` on."""
        return F.linear(self.hidden(ids, cache, at), self.embedding)

    def hidden(self, ids: Tensor, cache: Cache | None = None, at: int = 0, texts: Tensor | None = None) -> Tensor:
        """What the output matrix is applied to: the last layer's output, normed.

        ``texts``, numbers like ``ids``, tell apart the texts of a row, one after another: none sees another, and each
        begins at position 0. They go without a cache.
        """
        new = ids.shape[1]
        mask = torch.full((new, at + new), float("-inf"), device=ids.device).triu(at + 1)
        turn = self.cos[at : at + new], self.sin[at : at + new]
        if texts is not None:
            other = texts[:, :, None] != texts[:, None]
            mask = mask.masked_fill(other, float("-inf")).repeat_interleave(self.shape.num_key_value_heads, 0)[:, None]
            places = torch.arange(new, device=ids.device) - (other.int().argmin(-1))
            turn = self.cos[places][:, None], self.sin[places][:, None]
        x = F.embedding(ids, self.embedding)
        for i, layer in enumerate(self.model["layers"]):  # type: ignore[arg-type, var-annotated]
            x = x + layer.self_attn(layer.input_layernorm(x), turn, mask, cache, i)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        out: Tensor = self.model["norm"](x)
        return out

    @property
    def embedding(self) -> Tensor:
        """The matrix that is both embedding and output."""
        return self.model["embed_tokens"].weight  # type: ignore[return-value]

    def parameter_count(self) -> int:
        """Parameters, the tied embedding once."""
        return sum(p.numel() for p in self.parameters())


@torch.no_grad()
def generate(model: Llama, prompt: Tensor, new: int, temperature: float) -> Tensor:
    """``prompt`` (rows, length) and ``new`` more tokens, the likeliest ones at temperature 0."""
    rows, size = prompt.shape[0], prompt.shape[1] + new
    s, where = model.shape, prompt.device
    blank = torch.zeros(rows, s.num_key_value_heads, size, s.head_dim, device=where)
    cache: Cache = [(blank.clone(), blank.clone()) for _ in range(s.num_hidden_layers)]
    text, step, at = prompt, prompt, 0
    for _ in range(new):
        logits = model(step, cache, at)[:, -1].float()
        at += step.shape[1]
        if temperature == 0:
            step = logits.argmax(-1, keepdim=True)
        else:
            step = torch.multinomial((logits / temperature).softmax(-1), 1)
        text = torch.cat([text, step], 1)
    return text
