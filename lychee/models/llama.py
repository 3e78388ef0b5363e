"""The Llama forward pass (arXiv:2302.13971, arXiv:2307.09288) over the ops of lychee.kernels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lychee.kernels import (
    add_rms_norm,
    attention,
    attention_prefill,
    embed,
    linear,
    linear_prefill,
    lm_head,
    rms_norm,
    rope_store,
    swiglu,
)
from lychee.kernels.types import Hidden, Logits, RopeTable

from .batch import Batch
from .config import ModelConfig
from .kv_cache import KVCache
from .model_files import open_model
from .rope import rope_table
from .weights import LayerWeights, LlamaWeights, Projection, load_weights


@dataclass(frozen=True)
class Llama:
    config: ModelConfig
    weights: LlamaWeights
    rope: RopeTable

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Llama:
        """Read a Hugging Face directory or a GGUF file. `dtype` None keeps the config's. Raises ModelError."""
        config, checkpoint = open_model(Path(path), dtype)
        weights = load_weights(checkpoint, config, dtype or config.dtype, device)
        return cls(config, weights, rope_table(config.rope, config.head_dim, config.max_position_embeddings, device))

    def forward(self, batch: Batch, kv: KVCache) -> Logits:
        """Logits of `batch.logit_rows`, or of every row; stores the keys and values of all rows in `kv`."""
        weights, eps = self.weights, self.config.rms_norm_eps
        residual = embed(batch.tokens, weights.embed)
        x = rms_norm(residual, weights.layers[0].attn_norm, eps)
        next_norms = [layer.attn_norm for layer in weights.layers[1:]] + [weights.norm]
        for layer, next_norm, cache in zip(weights.layers, next_norms, kv.layers, strict=True):
            x = self._attend(x, layer, batch, cache)
            x, residual = add_rms_norm(x, residual, layer.ffn_norm, eps)
            gate, up = _project(x, layer.gate, batch), _project(x, layer.up, batch)
            x = _project(swiglu(gate, up), layer.down, batch)
            x, residual = add_rms_norm(x, residual, next_norm, eps)
        return self._logits(x, batch)

    def _attend(self, x: Hidden, layer: LayerWeights, batch: Batch, cache: tuple[Tensor, Tensor]) -> Hidden:
        """softmax(q k^T / sqrt(head_dim)) v over each row's own past, keys and values from the paged cache."""
        num_tokens, head_dim = x.shape[0], self.config.head_dim
        q, k, v = (_project(x, p, batch).view(num_tokens, -1, head_dim) for p in (layer.q, layer.k, layer.v))
        q = rope_store(q, k, v, *cache, self.rope, batch.positions, batch.slot_mapping)
        scale = head_dim**-0.5
        if batch.ancestors is not None:
            out = attention(q, *cache, batch.paging, batch.ancestors, scale)
        else:
            out = attention_prefill(q, *cache, batch.paging, scale)
        return _project(out.flatten(1), layer.o, batch)

    def _logits(self, x: Hidden, batch: Batch) -> Logits:
        if batch.logit_rows is not None:
            x = x.index_select(0, batch.logit_rows)
        if x.shape[0] == 0:
            return x.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        return lm_head(x, self.weights.lm_head)


def _project(x: Hidden, projection: Projection, batch: Batch) -> Tensor:
    return (linear if batch.is_decode else linear_prefill)(x, projection.weight, projection.bias)
