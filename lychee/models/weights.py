"""Weights of a Llama: Hugging Face tensor names mapped to one frozen dataclass per layer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lychee.kernels.types import Bias, EmbedTable, HiddenScale, Weight

from .config import ModelConfig
from .files import ModelError
from .safetensors_io import Checkpoint, TensorSource, listed

# A buffer that old exports saved; it follows from the config.
IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Projection:
    """y = x @ weight.T + bias."""

    weight: Weight
    bias: Bias | None


@dataclass(frozen=True)
class LayerWeights:
    attn_norm: HiddenScale
    q: Projection
    k: Projection
    v: Projection
    o: Projection
    ffn_norm: HiddenScale
    gate: Projection
    up: Projection
    down: Projection


@dataclass(frozen=True)
class LlamaWeights:
    """`lm_head` is `embed` itself where the two are tied."""

    embed: EmbedTable
    layers: tuple[LayerWeights, ...]
    norm: HiddenScale
    lm_head: Weight

    @property
    def num_bytes(self) -> int:
        """Memory of the weights; a tied head counts once."""
        parts: list[object] = [self.embed, self.norm, self.lm_head]
        for layer in self.layers:
            parts += vars(layer).values()
        parts += [tensor for part in parts if isinstance(part, Projection) for tensor in vars(part).values()]
        return sum({t.data_ptr(): t.nbytes for t in parts if isinstance(t, Tensor)}.values())


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the config asks for, under its Hugging Face name."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in (f"model.layers.{i}" for i in range(config.num_layers)):
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        for name, shape in projections.items():
            shapes[f"{layer}.{name}.weight"] = shape
            if config.mlp_bias if name.startswith("mlp") else config.attention_bias:
                shapes[f"{layer}.{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check(checkpoint: TensorSource, shapes: dict[str, tuple[int, ...]], tied: bool) -> None:
    """Refuse missing, unexpected, misshapen and non-float tensors, naming file and tensors."""
    allowed = shapes | ({"lm_head.weight": shapes["model.embed_tokens.weight"]} if tied else {})
    entries = {n: e for n, e in checkpoint.entries.items() if not IGNORED.fullmatch(n)}
    if missing := [n for n in shapes if n not in entries]:
        raise ModelError(f"{checkpoint.path} lacks the tensors {listed(missing)}")
    if unexpected := [n for n in entries if n not in allowed]:
        files = sorted({str(entries[n].file) for n in unexpected})
        raise ModelError(f"{listed(files)} has tensors that the config does not ask for: {listed(unexpected)}")
    for name, entry in entries.items():
        if entry.shape != allowed[name]:
            raise ModelError(f"{entry.file}: {name} has shape {list(entry.shape)}, must be {list(allowed[name])}")
        if entry.dtype not in FLOATS:
            raise ModelError(f"{entry.file}: {name} has dtype {entry.dtype}, must be {' or '.join(FLOATS)}")


def load_weights(
    source: Path | TensorSource, config: ModelConfig, dtype: torch.dtype, device: torch.device | str
) -> LlamaWeights:
    """Read a checkpoint, converted to `dtype` on `device`. Raises ModelError before anything is allocated."""
    checkpoint = Checkpoint.open(source) if isinstance(source, Path) else source
    shapes = expected_shapes(config)
    check(checkpoint, shapes, config.tie_word_embeddings)
    if config.tie_word_embeddings and "lm_head.weight" in checkpoint.entries:
        _check_tied(checkpoint)
    tensors = {n: t.to(device=device, dtype=dtype, copy=True) for n, t in checkpoint.read(list(shapes))}
    return LlamaWeights(
        embed=tensors["model.embed_tokens.weight"],
        layers=tuple(_layer(tensors, f"model.layers.{i}") for i in range(config.num_layers)),
        norm=tensors["model.norm.weight"],
        lm_head=tensors["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"],
    )


def _check_tied(checkpoint: TensorSource) -> None:
    """A head saved beside a tied embedding must be the same, or one of config and file is wrong."""
    head, embed = (t for _, t in checkpoint.read(["lm_head.weight", "model.embed_tokens.weight"]))
    if not torch.equal(head, embed):
        file = checkpoint.entries["lm_head.weight"].file
        raise ModelError(f"{file}: lm_head.weight differs from model.embed_tokens.weight, which the config ties it to")


def _layer(tensors: dict[str, Tensor], name: str) -> LayerWeights:
    def projection(part: str) -> Projection:
        return Projection(tensors[f"{name}.{part}.weight"], tensors.get(f"{name}.{part}.bias"))

    return LayerWeights(
        attn_norm=tensors[f"{name}.input_layernorm.weight"],
        q=projection("self_attn.q_proj"),
        k=projection("self_attn.k_proj"),
        v=projection("self_attn.v_proj"),
        o=projection("self_attn.o_proj"),
        ffn_norm=tensors[f"{name}.post_attention_layernorm.weight"],
        gate=projection("mlp.gate_proj"),
        up=projection("mlp.up_proj"),
        down=projection("mlp.down_proj"),
    )
