"""Hugging Face model directories: writing what was trained and reading it again."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .model import Llama, Shape


def save(model: Llama, folder: Path) -> None:
    """Write a Hugging Face model directory, less the tokenizer: fp16 weights and the two config files."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {n: p.detach().to("cpu", torch.float16).contiguous() for n, p in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": True,
        "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float16",
        **asdict(model.shape),
    }  # fmt: skip
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})


def write_json(path: Path, value: object) -> None:
    """Write ``value`` with one key a line."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def load(folder: Path) -> Llama:
    """Read what ``save`` wrote, in float32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = Llama(Shape(**{name: config[name] for name in Shape.__dataclass_fields__}))
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: w.float() for name, w in weights.items()})
    return model.eval()
