"""Models of real sizes with random weights: what they cost is real, what they say is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lychee.kernels.quantized import sample_int4, sample_int8
from lychee.models.config import ModelConfig
from lychee.models.llama import Llama
from lychee.models.projection import AnyWeight, Projection, moved
from lychee.models.rope import rope_table
from lychee.models.weights import LayerWeights, LlamaWeights

FORMATS = ("float", "int8", "int4")  # int4: groups of 128 with a minimum


def _config(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }


SHAPES = {
    "llama-2-7b": _config(4096, 11008, 32, 32, 32, 32000),
    "llama-3.1-8b": _config(4096, 14336, 32, 32, 8, 128256),
    "tinyllama-1.1b": _config(2048, 5632, 22, 32, 4, 32000),
    "llama-3.2-1b": _config(2048, 8192, 16, 32, 8, 128256),
    "tiny": _config(128, 256, 3, 4, 2, 512),
    "tiny-draft": _config(64, 128, 1, 2, 1, 512),
}


def config_of(name: str) -> ModelConfig:
    """Of one of SHAPES, or of a config.json. Raises ValueError for anything else."""
    if name in SHAPES:
        return ModelConfig.parse(SHAPES[name], where=name)
    if not Path(name).is_file():
        raise ValueError(f"{name} is neither a file nor one of {', '.join(SHAPES)}")
    return ModelConfig.parse(json.loads(Path(name).read_text(encoding="utf-8")), where=name)


def random_model(config: ModelConfig, fmt: str, dtype: torch.dtype, device: str, seed: int = 0) -> Llama:
    """Weights of rows of about unit length, made on the device. `fmt`, one of FORMATS, is that of the projections.

    The head and the embedding are of `dtype`, and for other formats the head is int8, as in files that lychee makes.
    """
    with torch.random.fork_rng(devices=[device] if device != "cpu" else []):
        torch.manual_seed(seed)

        def dense(rows: int, width: int) -> Tensor:
            return torch.randn(rows, width, dtype=dtype, device=device).mul_(width**-0.5)

        def weight(rows: int, width: int, kind: str) -> AnyWeight:
            if kind == "int8":
                return moved(sample_int8(rows, width, 0, device), device, dtype)
            if kind == "int4":
                return moved(sample_int4(rows, width, 128, 1, 0, device), device, dtype)
            return dense(rows, width)

        def scale() -> Tensor:
            return torch.ones(config.hidden_size, dtype=dtype, device=device)

        hidden, ffn = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        sizes = {"q": (q_size, hidden), "k": (kv_size, hidden), "v": (kv_size, hidden), "o": (hidden, q_size)}
        sizes |= {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
        layers = []
        for _ in range(config.num_layers):
            projections = {name: Projection(weight(*size, fmt)) for name, size in sizes.items()}
            layers.append(LayerWeights(attn_norm=scale(), q_norm=None, k_norm=None, ffn_norm=scale(), **projections))
        head = weight(config.vocab_size, hidden, "float" if fmt == "float" else "int8")
        weights = LlamaWeights(dense(config.vocab_size, hidden), tuple(layers), scale(), head)
    return Llama(config, weights, rope_table(config.rope, config.head_dim, config.max_positions, device))
