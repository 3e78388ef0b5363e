"""The directory of a finished draft: configuration, weights and model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bench.demo_pair.files import write_json
from bench.demo_pair.model import Llama

from .net import Draft

DROPPED = ("quantization_config", "dtype", "rope_parameters", "rope_scaling", "transformers_version")
"""Keys of the target's configuration that its draft's does not have; the rotary base is under ``rope_theta``."""
PROBES = 16
"""How many rows of the target's embedding are kept, so that another target can be told."""


def probe(embedding: torch.Tensor) -> torch.Tensor:
    """Rows spread evenly through the embedding."""
    ids = [i * embedding.shape[0] // PROBES for i in range(PROBES)]
    return embedding.detach()[ids].to("cpu", torch.float16).contiguous()


def save(draft: Draft, target_config: dict[str, Any], ends: list[int], folder: Path) -> None:
    """Write the configuration and the weights; the weights' file is replaced at once."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in target_config.items() if not k.startswith("_") and k not in DROPPED}
    config |= {
        "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "tie_word_embeddings": True,
        "num_hidden_layers": draft.net.shape.num_hidden_layers, "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "lychee_draft": {"shares_embedding": True, "output_vocab": len(draft.output_ids)},
    }  # fmt: skip
    write_json(folder / "config.json", config)
    weights = {n: w.to("cpu", torch.bfloat16).contiguous() for n, w in draft.written().items()}
    weights |= {"output_ids": draft.output_ids.cpu(), "embed_probe": probe(draft.net.embedding)}
    save_file(weights, folder / "model.new", metadata={"format": "pt"})
    (folder / "model.new").chmod(0o644)
    (folder / "model.new").replace(folder / "model.safetensors")


def load(folder: Path, target: Llama) -> Draft:
    """The draft in ``folder``, for its target. Raises ValueError for another one."""
    weights = load_file(folder / "model.safetensors")
    if not torch.equal(weights.pop("embed_probe"), probe(target.embedding)):
        raise ValueError(f"{folder} was not trained for this target")
    layers = json.loads((folder / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    draft = Draft(target, list(range(layers)), weights.pop("output_ids"))
    draft.net.load_state_dict({n: w.float() for n, w in weights.items()}, strict=False)
    return draft.eval()
