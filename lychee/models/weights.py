"""Weights of a model: Hugging Face tensor names mapped to one frozen dataclass per layer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lychee.kernels.types import HeadScale, HiddenScale

from .config import ModelConfig
from .files import ModelError
from .projection import AnyWeight, Projection, moved, parts
from .safetensors_io import ITEM_BYTES, listed
from .shared_embedding import companions, head_of, refuse_without_target
from .tensor_source import TensorSource

# A buffer that old exports saved; it follows from the config.
IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class LayerWeights:
    """`q_norm` and `k_norm` are None where the family does not norm queries and keys."""

    attn_norm: HiddenScale
    q: Projection
    k: Projection
    v: Projection
    q_norm: HeadScale | None
    k_norm: HeadScale | None
    o: Projection
    ffn_norm: HiddenScale
    gate: Projection
    up: Projection
    down: Projection


@dataclass(frozen=True)
class LlamaWeights:
    """`lm_head` is `embed` itself where the two are tied.

    `output_of` [vocab_size] int32: the head's row of each token, -1 for none; None where row i is token i.
    """

    embed: AnyWeight
    layers: tuple[LayerWeights, ...]
    norm: HiddenScale
    lm_head: AnyWeight
    output_of: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of activations: what quantised weights are multiplied with."""
        return self.norm.dtype

    @property
    def tensors(self) -> dict[int, Tensor]:
        """All of them, by address."""
        return {tensor.data_ptr(): tensor for tensor in self._each}

    @property
    def _each(self) -> Iterator[Tensor]:
        """What the model is made of; a tensor that has two uses comes twice."""
        found: list[Tensor | None] = [self.norm, self.output_of, *parts(self.embed), *parts(self.lm_head)]
        for part in (part for layer in self.layers for part in vars(layer).values()):
            found += [*parts(part.weight), part.bias] if isinstance(part, Projection) else [part]
        return (tensor for tensor in found if tensor is not None)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights; a tied head counts once."""
        return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in self._each}.values())


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
    shapes: dict[str, tuple[int, ...]] = {}
    if not config.output_vocab:
        shapes["model.embed_tokens.weight"] = (config.vocab_size, hidden)
    for layer in (f"model.layers.{i}" for i in range(config.num_layers)):
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = shapes[f"{layer}.self_attn.k_norm.weight"] = (config.head_dim,)
        for name, shape in projections.items():
            shapes[f"{layer}.{name}.weight"] = shape
            if name in config.biased:
                shapes[f"{layer}.{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings and not config.output_vocab:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    if config.output_vocab:
        shapes |= {name: shape for name, (shape, _) in companions(config.output_vocab, hidden).items()}
    return shapes


def check(source: TensorSource, config: ModelConfig) -> None:
    """Refuse missing, unexpected and misshapen tensors and those of a wrong dtype, naming file and tensors."""
    shapes = expected_shapes(config)
    allowed = dict(shapes)
    if config.tie_word_embeddings and not config.output_vocab:
        allowed["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    own = {name: dtypes for name, (_, dtypes) in companions(config.output_vocab, config.hidden_size).items()}
    entries = {n: e for n, e in source.entries.items() if not IGNORED.fullmatch(n)}
    if missing := [n for n in shapes if n not in entries]:
        raise ModelError(f"{source.path} lacks the tensors {listed(missing)}")
    if unexpected := [n for n in entries if n not in allowed]:
        files = sorted({str(entries[n].file) for n in unexpected})
        raise ModelError(f"{listed(files)} has tensors that the config does not ask for: {listed(unexpected)}")
    for name, entry in entries.items():
        if entry.shape != allowed[name]:
            raise ModelError(f"{entry.file}: {name} has shape {list(entry.shape)}, must be {list(allowed[name])}")
        dtypes = own.get(name, FLOATS)
        quantised = len(entry.shape) == 2 and entry.dtype not in ITEM_BYTES
        if entry.dtype not in dtypes and not quantised:
            raise ModelError(f"{entry.file}: {name} has dtype {entry.dtype}, must be {' or '.join(dtypes)}")


def load_weights(
    source: TensorSource,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    target: LlamaWeights | None = None,
) -> LlamaWeights:
    """Read a model, dense tensors converted to `dtype`, to `device`. Raises ModelError before anything is allocated.

    `target` has the embedding and the head that a draft may share.
    """
    check(source, config)
    if config.output_vocab and target is None:
        raise refuse_without_target(source.path)
    check_tied(source, config)
    weights: dict[str, AnyWeight] = {}
    dense: dict[str, Tensor] = {}
    own = companions(config.output_vocab, config.hidden_size) if config.output_vocab else {}
    for name, weight in source.read(list(expected_shapes(config))):
        if name in own and isinstance(weight, Tensor):
            dense[name] = weight.to(device)
            continue
        weights[name] = moved(weight, device, dtype)
        if isinstance(placed := weights[name], Tensor):
            dense[name] = placed
    output_of = None
    if config.output_vocab and target is not None:
        embed = target.embed
        lm_head, output_of = head_of(target.lm_head, embed, dense, config.vocab_size, str(source.path))
    else:
        embed = weights["model.embed_tokens.weight"]
        lm_head = embed if config.tie_word_embeddings else weights["lm_head.weight"]
    layers = tuple(layer_of(weights, dense, f"model.layers.{i}") for i in range(config.num_layers))
    return LlamaWeights(embed, layers, dense["model.norm.weight"], lm_head, output_of)


def check_tied(source: TensorSource, config: ModelConfig) -> None:
    """A head saved beside a tied embedding must be the same, or one of config and file is wrong."""
    if not config.tie_word_embeddings or "lm_head.weight" not in source.entries:
        return
    head, embed = (parts(weight) for _, weight in source.read(["lm_head.weight", "model.embed_tokens.weight"]))
    if len(head) != len(embed) or not all(map(torch.equal, head, embed)):
        file = source.entries["lm_head.weight"].file
        raise ModelError(f"{file}: lm_head.weight differs from model.embed_tokens.weight, which the config ties it to")


def layer_of(weights: Mapping[str, AnyWeight], dense: Mapping[str, Tensor], name: str) -> LayerWeights:
    def projection(part: str) -> Projection:
        return Projection(weights[f"{name}.{part}.weight"], dense.get(f"{name}.{part}.bias"))

    return LayerWeights(
        attn_norm=dense[f"{name}.input_layernorm.weight"],
        q=projection("self_attn.q_proj"),
        k=projection("self_attn.k_proj"),
        v=projection("self_attn.v_proj"),
        q_norm=dense.get(f"{name}.self_attn.q_norm.weight"),
        k_norm=dense.get(f"{name}.self_attn.k_norm.weight"),
        o=projection("self_attn.o_proj"),
        ffn_norm=dense[f"{name}.post_attention_layernorm.weight"],
        gate=projection("mlp.gate_proj"),
        up=projection("mlp.up_proj"),
        down=projection("mlp.down_proj"),
    )
