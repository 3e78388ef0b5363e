"""The config of a GGUF file: its metadata under the keys of a Hugging Face config.json, for ModelConfig.parse."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Kind

from .files import ModelError
from .gguf_checkpoint import ROPE_FACTORS
from .gguf_file import GGUFFile
from .gguf_tensors import read_floats
from .rope import RopeConfig, inverse_frequencies

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SIZES = {  # by the key's name under the architecture's prefix
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
}
REQUIRED = ("embedding_length", "feed_forward_length", "block_count", "attention.head_count", "context_length")
READ = {
    *SIZES,
    "vocab_size",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",  # how the weights came to be
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
NEUTRAL = {  # features that are not implemented, with the values that leave them off
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "tensor_data_layout": ("Meta AI original pth", "reference"),  # both have rotary pairs side by side
}
ENDS = ("eos", "eot", "eom")
TRAINED_LENGTHS = tuple(1 << bits for bits in range(10, 18))


def config_values(file: GGUFFile) -> dict[str, Any]:
    """Hugging Face's keys. Raises ModelError naming an architecture or a key that has no equivalent here."""
    prefix = file.get("general.architecture", str)
    if prefix not in ARCHITECTURES:
        raise file.refuse("general.architecture", " or ".join(ARCHITECTURES))
    _check_keys(file, prefix)
    values: dict[str, Any] = {name: file.get(f"{prefix}.{key}", int) for key, name in SIZES.items()}
    for key in REQUIRED:
        if values[SIZES[key]] is None:
            raise ModelError(f"{file.path}: {prefix}.{key} is missing")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.path} has no matrix token_embd.weight")
    values["vocab_size"] = embedding.shape[0]
    if file.get(f"{prefix}.vocab_size", int, embedding.shape[0]) != embedding.shape[0]:
        raise file.refuse(f"{prefix}.vocab_size", f"the rows of token_embd.weight ({embedding.shape[0]})")
    epsilon = file.get(f"{prefix}.attention.layer_norm_rms_epsilon", float)
    if epsilon is None:
        raise ModelError(f"{file.path}: {prefix}.attention.layer_norm_rms_epsilon is missing")
    ends = [file.get(f"tokenizer.ggml.{end}_token_id", int) for end in ENDS]
    return {
        **values,
        **_family(file, prefix),
        **_rope(file, prefix),
        "rms_norm_eps": shortest(epsilon),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": sorted({end for end in ends if end is not None}),
        "torch_dtype": _dtype(file),
    }


def shortest(value: float) -> float:
    """The number that was meant: the shortest decimal that is this float32 (1e-05, not 9.999999747378752e-06)."""
    return float(str(np.float32(value)))


def _check_keys(file: GGUFFile, prefix: str) -> None:
    for key, value in file.metadata.items():
        name = key.removeprefix(f"{prefix}.")
        if name == key:
            continue
        if name not in READ and name not in NEUTRAL:
            raise ModelError(f"{file.path}: {key} is not known here, and may change what is computed")
        if name in NEUTRAL and not (isinstance(value, (int, float, str)) and value in NEUTRAL[name]):
            raise file.refuse(key, " or ".join(map(str, NEUTRAL[name])))
    head_dim = file.get(f"{prefix}.attention.key_length", int)
    if head_dim is None:
        hidden, heads = (file.get(f"{prefix}.{key}", int) for key in ("embedding_length", "attention.head_count"))
        head_dim = hidden // heads if hidden and heads else 0
    for key in (f"{prefix}.attention.value_length", f"{prefix}.rope.dimension_count"):
        if file.get(key, int, head_dim) != head_dim:
            raise file.refuse(key, f"the size of a head ({head_dim})")


def _family(file: GGUFFile, prefix: str) -> dict[str, Any]:
    """What names the family, and the switches that only it has."""
    window = file.get(f"{prefix}.attention.sliding_window", int)
    values: dict[str, Any] = {"sliding_window": window or None}
    if prefix == "llama":
        values["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        values["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
        if window:  # the format has no name of its own for Mistral
            return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **values}
    elif window:
        raise file.refuse(f"{prefix}.attention.sliding_window", "absent, as the file does not say for which layers")
    if prefix == "qwen3":
        values["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    return {"architectures": [ARCHITECTURES[prefix]], "model_type": prefix, **values}


def _rope(file: GGUFFile, prefix: str) -> dict[str, Any]:
    """A factor without a type is linear, as files of older converters have it."""
    rope = f"{prefix}.rope"
    theta = shortest(file.get(f"{rope}.freq_base", float, 10000.0))
    factor = file.get(f"{rope}.scaling.factor", float, file.get(f"{rope}.scale_linear", float))
    kind = file.get(f"{rope}.scaling.type", str, "none" if factor in (None, 0.0, 1.0) else "linear")
    if kind not in ("none", "linear", "yarn"):
        raise file.refuse(f"{rope}.scaling.type", "none or linear or yarn")
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise file.refuse(f"{rope}.scaling.type", f"none beside a tensor {ROPE_FACTORS}")
        return {"rope_theta": theta, "rope_scaling": _llama3(file, theta)}
    if kind == "none":
        return {"rope_theta": theta, "rope_scaling": None}
    scaling = {"rope_type": kind, "factor": None if factor is None else shortest(factor)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = file.get(f"{rope}.scaling.original_context_length", int)
        scaling["beta_fast"] = file.get(f"{rope}.scaling.yarn_beta_fast", float)
        scaling["beta_slow"] = file.get(f"{rope}.scaling.yarn_beta_slow", float)
    return {"rope_theta": theta, "rope_scaling": {key: value for key, value in scaling.items() if value is not None}}


def _llama3(file: GGUFFile, theta: float) -> dict[str, Any] | None:
    """Llama 3 scaling from its effect, a divisor for each frequency: all published models have the same two bounds."""
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.type is not Kind.F32 or len(tensor.shape) != 1 or tensor.shape[0] > 1 << 10:
        raise ModelError(
            f"{file.path}: tensor {ROPE_FACTORS} is {tensor.type.name} {list(tensor.shape)}, must be F32 "
            "and have one value for each frequency of a head"
        )
    factors, head_dim = read_floats(file.path, tensor, torch.float32), 2 * tensor.shape[0]
    if bool((factors == 1).all()):
        return None
    plain = inverse_frequencies(RopeConfig(theta=theta), head_dim)
    for length in TRAINED_LENGTHS:
        rope = RopeConfig("llama3", theta, float(factors.max()), 1.0, 4.0, length)
        if torch.allclose(plain / inverse_frequencies(rope, head_dim), factors, rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3",
                "factor": rope.factor,
                "low_freq_factor": rope.low_freq_factor,
                "high_freq_factor": rope.high_freq_factor,
                "original_max_position_embeddings": length,
            }
    raise ModelError(
        f"{file.path}: tensor {ROPE_FACTORS} has values of no Llama 3 scaling with low_freq_factor 1 and "
        "high_freq_factor 4"
    )


def _dtype(file: GGUFFile) -> str:
    """What to compute in by default: the type of the first layer's queries, float16 where it is quantised."""
    tensor = file.tensors.get("blk.0.attn_q.weight")
    names = {Kind.F32: "float32", Kind.BF16: "bfloat16"}
    return "float16" if tensor is None else names.get(tensor.type, "float16")
