"""Families: what sets an architecture apart, as a table by its name in config.json.

The defaults, and what each key means, are those of transformers' config and model classes of that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .config_keys import HARMLESS, NEUTRAL, READ
from .fields import Fields, shown
from .files import ModelError

QKV = frozenset(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
ATTENTION = QKV | {"self_attn.o_proj"}
MLP = frozenset(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))
WINDOW_KEYS = {
    "none": (),
    "every layer": ("sliding_window",),
    "some layers": ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
}
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Family:
    """`defaults` are of keys that a config may leave out. Biases are of the projections in `biased`, and of those
    that a key of `bias_keys` switches on. `qk_norm`: queries and keys are RMS-normed, head by head, before rotation."""

    model_type: str
    defaults: Mapping[str, Any]
    biased: frozenset[str] = frozenset()
    bias_keys: Mapping[str, frozenset[str]] = field(default_factory=dict)
    qk_norm: bool = False
    windowed: Literal["none", "every layer", "some layers"] = "none"


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama", {"max_position_embeddings": 2048}, bias_keys={"attention_bias": ATTENTION, "mlp_bias": MLP}
    ),
    "MistralForCausalLM": Family(
        "mistral",
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        windowed="every layer",
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        biased=QKV,
        windowed="some layers",
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        bias_keys={"attention_bias": ATTENTION},
        qk_norm=True,
        windowed="some layers",
    ),
}


def family_of(config: Fields) -> Family:
    """By `architectures`, or where there is none by `model_type`; Llama without either. Raises ModelError."""
    model_types = {family.model_type: name for name, family in FAMILIES.items()}
    model_type = config.values.get("model_type")
    if model_type is not None and model_type not in list(model_types):
        raise config.refuse("model_type", " or ".join(model_types))
    names = config.values.get("architectures") or [model_types[model_type or "llama"]]
    if names not in [[name] for name in FAMILIES]:
        raise config.refuse("architectures", " or ".join(f"[{name}]" for name in FAMILIES))
    family = FAMILIES[names[0]]
    if model_type not in (None, family.model_type):
        raise config.refuse("model_type", f"{family.model_type} with {names[0]}")
    return family


def layer_windows(config: Fields, family: Family, num_layers: int) -> tuple[int, ...]:
    """Positions that a row of each layer sees, its own included; 0 for all. Raises ModelError."""
    if family.windowed == "none":
        return (0,) * num_layers
    if family.windowed == "every layer":
        return (config.size("sliding_window", 0),) * num_layers
    window = config.size("sliding_window", 0) if config.flag("use_sliding_window") else 0
    first = config.size("max_window_layers", num_layers, least=0)
    kinds = config.values.get("layer_types")
    if kinds is None:
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in LAYER_TYPES for kind in kinds):
        raise config.refuse("layer_types", f"a list of num_hidden_layers ({num_layers}) of {' or '.join(LAYER_TYPES)}")
    if not window and LAYER_TYPES[1] in kinds:
        raise config.refuse("layer_types", f"{LAYER_TYPES[0]} alone where no sliding_window is used")
    return tuple(window if kind == LAYER_TYPES[1] else 0 for kind in kinds)


def biased_projections(config: Fields, family: Family) -> frozenset[str]:
    """Names, as in `model.layers.0.NAME.bias`, of the projections that have a bias. Raises ModelError."""
    return family.biased.union(*(names for key, names in family.bias_keys.items() if config.flag(key)))


def check_keys(config: Fields, family: Family) -> None:
    """Refuse, by name, whatever may change the arithmetic into one that is not implemented."""
    read = {*READ, *family.bias_keys, *WINDOW_KEYS[family.windowed]}
    for key, value in config.values.items():
        if key in read or key in HARMLESS or key.startswith("_") or value is None:
            continue
        if key not in NEUTRAL:
            raise ModelError(
                f"{config.where}: {key} is {shown(value)[:200]}, must be absent: it is no key of {family.model_type}"
            )
        if value not in NEUTRAL[key]:
            raise config.refuse(key, " or ".join(map(shown, (None, *NEUTRAL[key]))))
