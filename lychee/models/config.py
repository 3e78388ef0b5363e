"""ModelConfig: the numbers of a Llama, read and checked from a Hugging Face config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .files import ModelError, read_json
from .rope import ROPE_TYPES, RopeConfig

ARCHITECTURES = ("LlamaForCausalLM",)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Largest believable value of each size: a config is untrusted, and tables are allocated from it.
LIMITS = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 19,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 10,
    "num_key_value_heads": 1 << 10,
    "head_dim": 1 << 10,
    "max_position_embeddings": 1 << 21,
}
# Keys that change the arithmetic into one that is not implemented, with the values that leave it alone.
# pretraining_tp is not among them: it only splits the sums of the same products.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (None, 1),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "qk_norm": (None, False),
    "use_qk_norm": (None, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}


@dataclass(frozen=True)
class ModelConfig:
    """`dtype` is what the checkpoint was saved in; `eos_token_ids` is empty where the files name none."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: frozenset[int]
    dtype: torch.dtype

    @classmethod
    def load(cls, path: Path) -> ModelConfig:
        """From config.json and, where it exists, generation_config.json. Raises ModelError."""
        generation = path / "generation_config.json"
        return cls.parse(
            read_json(path / "config.json"),
            read_json(generation) if generation.is_file() else {},
            where=str(path / "config.json"),
        )

    @classmethod
    def parse(
        cls, values: Mapping[str, Any], generation: Mapping[str, Any] | None = None, where: str = "config.json"
    ) -> ModelConfig:
        config = _Fields(where, values)
        other = _Fields("generation_config.json", generation or {})
        architectures = config.values.get("architectures") or ["LlamaForCausalLM"]
        if architectures not in [[a] for a in ARCHITECTURES]:
            raise config.refuse("architectures", f"[{', '.join(ARCHITECTURES)}]")
        if config.values.get("model_type", "llama") != "llama":
            raise config.refuse("model_type", "llama")
        for key, neutral in NEUTRAL.items():
            if config.values.get(key, neutral[0]) not in neutral:
                raise config.refuse(key, " or ".join(map(_shown, neutral)))
        hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
        num_kv_heads = config.size("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise config.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
        if config.values.get("head_dim") is None and hidden_size % num_heads:
            raise config.refuse("hidden_size", f"a multiple of num_attention_heads ({num_heads}) without a head_dim")
        head_dim = config.size("head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise config.refuse("head_dim", "even, as rotary embedding turns pairs", head_dim)
        vocab_size = config.size("vocab_size")
        max_position = config.size("max_position_embeddings", 2048)
        eos_ids = [i for source in (config, other) for i in source.token_ids("eos_token_id", vocab_size)]
        return cls(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=config.size("intermediate_size"),
            num_layers=config.size("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_position,
            rms_norm_eps=config.number("rms_norm_eps", 1e-6),
            rope=_rope(config, max_position),
            tie_word_embeddings=config.flag("tie_word_embeddings"),
            attention_bias=config.flag("attention_bias"),
            mlp_bias=config.flag("mlp_bias"),
            eos_token_ids=frozenset(eos_ids),
            dtype=_dtype(config),
        )


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return repr(value) if isinstance(value, str) and value.isdecimal() else str(value)


@dataclass(frozen=True)
class _Fields:
    """A JSON object with checked access; `where` names it in errors."""

    where: str
    values: Mapping[str, Any]

    def refuse(self, key: str, allowed: str, value: Any = None) -> ModelError:
        shown = _shown(self.values.get(key) if value is None else value)
        return ModelError(f"{self.where}: {key} is {shown[:200]}, must be {allowed}")

    def size(self, key: str, default: int | None = None) -> int:
        """An integer from 1 to its limit; null counts as absent."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self.where}: {key} is missing")
            return default
        if type(value) is not int or not 1 <= value <= LIMITS[key]:
            raise self.refuse(key, f"an integer from 1 to {LIMITS[key]}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; null counts as absent."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self.where}: {key} is missing")
            return default
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.refuse(key, "a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value not in (None, False, True) or type(value) is int:
            raise self.refuse(key, "true or false")
        return bool(value)

    def token_ids(self, key: str, vocab_size: int) -> list[int]:
        """One id, a list of them, or null."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(i) is not int or not 0 <= i < vocab_size for i in ids):
            raise self.refuse(key, f"a token id below vocab_size ({vocab_size}), a list of them, or null")
        return ids


def _dtype(config: _Fields) -> torch.dtype:
    key = "dtype" if "dtype" in config.values else "torch_dtype"
    name = config.values.get(key) or "float32"
    if not isinstance(name, str) or (name := name.removeprefix("torch.")) not in DTYPES:
        raise config.refuse(key, " or ".join(DTYPES))
    return DTYPES[name]


def _rope(config: _Fields, max_position: int) -> RopeConfig:
    """Both schemas: `rope_theta` beside `rope_scaling`, and `rope_parameters` that holds all of it."""
    key = "rope_parameters" if config.values.get("rope_parameters") else "rope_scaling"
    given = config.values.get(key) or {}
    if not isinstance(given, dict):
        raise config.refuse(key, "an object or null")
    if key == "rope_parameters" and config.values.get("rope_scaling") not in (None, given):
        raise config.refuse("rope_scaling", "absent beside rope_parameters, or the same")
    scaling = _Fields(f"{config.where}: {key}", given)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise config.refuse(f"{key}.rope_type", " or ".join(ROPE_TYPES), kind)
    if given.get("partial_rotary_factor", 1) != 1:
        raise scaling.refuse("partial_rotary_factor", "1")
    theta = scaling.number("rope_theta", config.number("rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = scaling.number("factor")
    if factor < 1:
        raise scaling.refuse("factor", "at least 1")
    if kind == "linear":
        return RopeConfig(kind, theta, factor)
    original = scaling.number("original_max_position_embeddings", max_position)
    original = config.number("original_max_position_embeddings", original)
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low >= high:
        raise scaling.refuse("low_freq_factor", f"below high_freq_factor ({high})")
    return RopeConfig(kind, theta, factor, low, high, int(original))
