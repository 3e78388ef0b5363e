"""The Llama forward pass (arXiv:2302.13971, arXiv:2307.09288) over the ops of lychee.kernels.

Other families differ from it by what their config declares: biases, normed queries and keys, windows (`families.py`).
"""

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
    rms_norm,
    rope_store,
    spread_logits,
    swiglu,
)
from lychee.kernels.types import HeadScale, Hidden, Logits, RopeTable

from .batch import Batch
from .config import ModelConfig
from .kv_cache import KVCache
from .model_files import OpenedModel, open_model
from .projection import embedded, logits_of
from .rope import rope_table
from .weights import LayerWeights, LlamaWeights, load_weights


@dataclass(frozen=True)
class Llama:
    config: ModelConfig
    weights: LlamaWeights
    rope: RopeTable

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        quant: str | None = None,
    ) -> Llama:
        """Read a Hugging Face directory or a GGUF file. Raises ModelError.

        `dtype`, of what is not quantised and of activations: None is the config's. `quant` as for `open_model`.
        """
        return cls.of(open_model(Path(path), dtype, quant), device, dtype)

    @classmethod
    def of(
        cls,
        opened: OpenedModel,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        target: Llama | None = None,
    ) -> Llama:
        """As `load`. `target` has the embedding that a draft may share."""
        config, shared = opened.config, None if target is None else target.weights
        weights = load_weights(opened.source, config, dtype or config.dtype, device, shared)
        return cls(config, weights, rope_table(config.rope, config.head_dim, config.max_positions, device))

    def forward(self, batch: Batch, kv: KVCache) -> Logits:
        """Logits of `batch.logit_rows`, or of every row; stores the keys and values of all rows in `kv`."""
        weights, eps = self.weights, self.config.rms_norm_eps
        residual = embedded(batch.tokens, weights.embed, weights.norm)
        x = rms_norm(residual, weights.layers[0].attn_norm, eps)
        next_norms = [layer.attn_norm for layer in weights.layers[1:]] + [weights.norm]
        windows = self.config.windows
        for layer, window, next_norm, cache in zip(weights.layers, windows, next_norms, kv.layers, strict=True):
            x = self._attend(x, layer, window, batch, cache)
            x, residual = add_rms_norm(x, residual, layer.ffn_norm, eps)
            gate, up = layer.gate(x, batch.is_decode), layer.up(x, batch.is_decode)
            x = layer.down(swiglu(gate, up), batch.is_decode)
            x, residual = add_rms_norm(x, residual, next_norm, eps)
        return self._logits(x, batch)

    def _attend(
        self, x: Hidden, layer: LayerWeights, window: int, batch: Batch, cache: tuple[Tensor, Tensor]
    ) -> Hidden:
        """softmax(q k^T / sqrt(head_dim)) v over each row's own past, keys and values from the paged cache."""
        num_tokens, head_dim = x.shape[0], self.config.head_dim
        q, k, v = (p(x, batch.is_decode).view(num_tokens, -1, head_dim) for p in (layer.q, layer.k, layer.v))
        q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
        q = rope_store(q, k, v, *cache, self.rope, batch.positions, batch.slot_mapping)
        scale = head_dim**-0.5
        if batch.ancestors is not None:
            out = attention(q, *cache, batch.paging, batch.ancestors, scale, window)
        else:
            out = attention_prefill(q, *cache, batch.paging, scale, window)
        return layer.o(out.flatten(1), batch.is_decode)

    def _normed(self, heads: Tensor, scale: HeadScale | None) -> Tensor:
        """Queries or keys [num_tokens, heads, head_dim], each head normed as if it were a token."""
        return heads if scale is None else rms_norm(heads.flatten(0, 1), scale, self.config.rms_norm_eps).view_as(heads)

    def _logits(self, x: Hidden, batch: Batch) -> Logits:
        if batch.logit_rows is not None:
            if batch.logit_rows.shape[0] == 0:
                return x.new_empty(0, self.config.vocab_size, dtype=torch.float32)
            x = embed(batch.logit_rows, x)  # of x, a table, the rows that are asked for
        logits = logits_of(x, self.weights.lm_head)
        return logits if self.weights.output_of is None else spread_logits(logits, self.weights.output_of)
