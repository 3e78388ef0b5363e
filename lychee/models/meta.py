"""Models of a config alone: tensors that have shapes and no memory, for plans."""

from __future__ import annotations

import torch

from lychee.kernels.types import Int4Weight, Int8Weight

from .config import ModelConfig
from .llama import Llama
from .projection import AnyWeight
from .quant_format import QuantFormat, format_of
from .rope import rope_table
from .weights import LlamaWeights, expected_shapes, layer_of


def meta_llama(config: ModelConfig, dtype: torch.dtype, quant: str | None = None) -> Llama:
    """A model on `meta`, of `dtype` and quantised as `open_model` does it. Its embedding must be its own."""
    if config.output_vocab:
        raise ValueError("a draft that shares its target's embedding is no model of its config alone")
    fmt = None if quant is None else QuantFormat.parse(quant)
    weights: dict[str, AnyWeight] = {}
    dense: dict[str, torch.Tensor] = {}
    for name, shape in expected_shapes(config).items():
        if fmt is None or (own := format_of(name, fmt, config.tie_word_embeddings)) is None:
            weights[name] = dense[name] = torch.empty(shape, dtype=dtype, device="meta")
        else:
            weights[name] = _quantised(shape[0], shape[1], own)
    embed = weights["model.embed_tokens.weight"]
    head = embed if config.tie_word_embeddings else weights["lm_head.weight"]
    layers = tuple(layer_of(weights, dense, f"model.layers.{i}") for i in range(config.num_layers))
    rope = rope_table(config.rope, config.head_dim, config.max_positions, "meta")
    return Llama(config, LlamaWeights(embed, layers, dense["model.norm.weight"], head), rope)


def _quantised(rows: int, columns: int, fmt: QuantFormat) -> Int8Weight | Int4Weight:
    scales = torch.empty(rows, columns // (fmt.group or columns), device="meta")
    if fmt.bits == 8:
        return Int8Weight(torch.empty(rows, columns, dtype=torch.int8, device="meta"), scales)
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device="meta")
    return Int4Weight(packed, scales, None if fmt.kind == "sym" else torch.empty_like(scales))
