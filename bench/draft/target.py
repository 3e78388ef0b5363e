"""The target: any Hugging Face directory of a Llama with tied embedding, read as the differentiable model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bench.demo_pair.model import Llama, Shape


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json``, with what older and newer files leave out or name otherwise filled in."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise SystemExit(f"{folder}: scaled rotary positions are not supported")
    if config.get("model_type") != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
        raise SystemExit(f"{folder}: the target must be a Llama without biases")
    if not config.get("tie_word_embeddings"):
        raise SystemExit(f"{folder}: the draft shares the target's embedding, which must be tied to its output")
    config.setdefault("rope_theta", rope.get("rope_theta", 10000.0))
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return config


def shape_of(config: dict[str, Any], positions: int) -> Shape:
    """The sizes, with rotary tables for ``positions`` places."""
    shape = Shape(**{name: config[name] for name in Shape.__dataclass_fields__})
    return replace(shape, max_position_embeddings=positions)


def end_ids(folder: Path) -> list[int]:
    """The ids that end a turn."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.exists() else None
        if found is not None:
            return list(found) if isinstance(found, list) else [found]
    raise SystemExit(f"{folder} names no eos_token_id")


def load_target(folder: Path, positions: int) -> Llama:
    """The target in float32, without gradients."""
    with torch.device("meta"):
        model = Llama(shape_of(read_config(folder), positions))
    weights = {n: w.float() for file in sorted(folder.glob("*.safetensors")) for n, w in load_file(file).items()}
    weights.pop("lm_head.weight", None)
    model.load_state_dict(weights, assign=True)
    model.cos, model.sin = rotary(model.shape)
    return model.requires_grad_(False).eval()


def rotary(s: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's rotary tables, which a model built on the meta device lacks."""
    speed = s.rope_theta ** (-torch.arange(0, s.head_dim, 2).float() / s.head_dim)
    angle = torch.outer(torch.arange(s.max_position_embeddings).float(), speed).repeat(1, 2)
    return angle.cos(), angle.sin()


def own_parameters(folder: Path) -> int:
    """The target's parameters without its embedding."""
    with torch.device("meta"):
        model = Llama(shape_of(read_config(folder), 1))
    return model.parameter_count() - model.embedding.numel()
