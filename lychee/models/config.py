"""ModelConfig: the numbers of a model, read and checked from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .families import biased_projections, check_keys, family_of, layer_windows
from .fields import MAX_POSITIONS, Fields
from .files import read_json
from .rope import RopeConfig
from .rope_config import parse_rope
from .shared_embedding import output_vocab

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelConfig:
    """`max_positions`: how long a sequence may be: max_position_embeddings, and further where rope is scaled to it.

    `windows`: positions that a row of each layer sees, 0 for all. `biased`: names of the projections with a bias.
    `dtype` is what the checkpoint was saved in; `eos_token_ids` is empty where the files name none.
    `output_vocab`: tokens that a draft sharing its target's embedding has logits for, 0 for any other model.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    biased: frozenset[str]
    qk_norm: bool
    windows: tuple[int, ...]
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    output_vocab: int

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
        """Raises ModelError naming the key, its value and what is allowed; `where` names the file."""
        family = family_of(Fields(where, values))
        config = Fields(where, {**family.defaults, **values})
        other = Fields("generation_config.json", generation or {})
        check_keys(Fields(where, values), family)
        hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
        num_layers, vocab_size = config.size("num_hidden_layers"), config.size("vocab_size")
        num_kv_heads = config.size("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            allowed = f"a divisor of num_attention_heads ({num_heads})"
            raise config.refuse("num_key_value_heads", allowed)
        if config.values.get("head_dim") is None and hidden_size % num_heads:
            raise config.refuse("hidden_size", f"a multiple of num_attention_heads ({num_heads}) without a head_dim")
        head_dim = config.size("head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise config.refuse("head_dim", "even, as rotary embedding turns pairs", head_dim)
        max_position = config.size("max_position_embeddings", family.defaults["max_position_embeddings"])
        rope = parse_rope(config, max_position, head_dim)
        if (max_positions := rope.reach(max_position)) > MAX_POSITIONS:
            raise config.refuse(
                "max_position_embeddings", f"at most {MAX_POSITIONS} when scaled by rope", max_positions
            )
        eos_ids = [i for source in (config, other) for i in source.token_ids("eos_token_id", vocab_size)]
        return cls(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=config.size("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_positions=max_positions,
            rms_norm_eps=config.number("rms_norm_eps", 1e-6),
            rope=rope,
            tie_word_embeddings=config.flag("tie_word_embeddings"),
            biased=biased_projections(config, family),
            qk_norm=family.qk_norm,
            windows=layer_windows(config, family, num_layers),
            eos_token_ids=frozenset(eos_ids),
            dtype=_dtype(config),
            output_vocab=output_vocab(config, vocab_size),
        )


def _dtype(config: Fields) -> torch.dtype:
    key = "dtype" if config.values.get("dtype") else "torch_dtype"
    name = config.values.get(key) or "float32"
    if not isinstance(name, str) or (name := name.removeprefix("torch.")) not in DTYPES:
        raise config.refuse(key, " or ".join(DTYPES))
    return DTYPES[name]
