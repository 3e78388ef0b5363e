"""Reads a RopeConfig from config.json, in both of its schemas."""

from __future__ import annotations

import math

from .config_keys import keys
from .fields import Fields
from .rope import RopeConfig

# What an object of rope scaling may hold beside its type and rope_theta; another key would be ignored in silence.
KEYS = {
    "default": keys(),
    "linear": keys("factor"),
    "dynamic": keys("factor"),
    "yarn": keys(
        "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim truncate",
        "finetuned",  # how the weights came to be
    ),
    "llama3": keys("factor low_freq_factor high_freq_factor original_max_position_embeddings"),
}
COMMON = keys("rope_type type rope_theta partial_rotary_factor")


def parse_rope(config: Fields, max_position: int, head_dim: int) -> RopeConfig:
    """`rope_theta` beside `rope_scaling`, or `rope_parameters` that holds all of it. Raises ModelError."""
    scaling, key = _object(config)
    kind = scaling.values.get("rope_type", scaling.values.get("type", "default"))
    if kind not in list(KEYS):
        raise config.refuse(f"{key}.rope_type", " or ".join(KEYS), kind)
    if scaling.values.get("type", kind) != kind:
        raise scaling.refuse("type", f"absent beside rope_type, or the same ({kind})")
    if scaling.values.get("partial_rotary_factor", 1) not in (None, 1):
        raise scaling.refuse("partial_rotary_factor", "1")
    for name, value in scaling.values.items():
        if value is not None and name not in KEYS[kind] | COMMON:
            raise scaling.refuse(name, f"absent with rope_type {kind}")
    theta = scaling.number("rope_theta", config.number("rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    original = scaling.size("original_max_position_embeddings", max_position) if kind in ("yarn", "llama3") else 0
    original = config.size("original_max_position_embeddings", original)
    factor = scaling.number("factor", max_position / original if kind == "yarn" else None)
    if factor < 1:
        raise scaling.refuse("factor", "at least 1", factor)
    if kind == "linear":
        return RopeConfig(kind, theta, factor)
    if kind == "dynamic":
        if head_dim == 2:
            raise config.refuse("head_dim", "at least 4 with rope_type dynamic", head_dim)
        return RopeConfig(kind, theta, factor, original_max_position_embeddings=max_position)
    if kind == "yarn":
        return _yarn(config, scaling, theta, factor, original)
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low >= high:
        raise scaling.refuse("low_freq_factor", f"below high_freq_factor ({high})")
    return RopeConfig(kind, theta, factor, low, high, original)


def _object(config: Fields) -> tuple[Fields, str]:
    """The object that names the type, empty where there is none, and the key it stands under."""
    key = "rope_parameters" if config.values.get("rope_parameters") else "rope_scaling"
    given = config.values.get(key) or {}
    if not isinstance(given, dict):
        raise config.refuse(key, "an object or null")
    if key == "rope_parameters" and config.values.get("rope_scaling") not in (None, given):
        raise config.refuse("rope_scaling", "absent beside rope_parameters, or the same")
    return Fields(f"{config.where}: {key}", given), key


def _yarn(config: Fields, scaling: Fields, theta: float, factor: float, original: int) -> RopeConfig:
    """`mscale` and `mscale_all_dim` count together, and where no `attention_factor` is given (DeepSeek)."""
    if theta <= 1:
        raise config.refuse("rope_theta", "above 1 with rope_type yarn", theta)
    fast, slow = scaling.number("beta_fast", 32.0), scaling.number("beta_slow", 1.0)
    if fast < slow:
        raise scaling.refuse("beta_fast", f"at least beta_slow ({slow})", fast)

    def magnitude(key: str | None) -> float:
        return 1.0 + 0.1 * (scaling.number(key) if key else 1.0) * math.log(factor)

    if scaling.values.get("mscale") is None or scaling.values.get("mscale_all_dim") is None:
        attention_factor = magnitude(None)
    else:
        attention_factor = magnitude("mscale") / magnitude("mscale_all_dim")
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original_max_position_embeddings=original,
        attention_factor=scaling.number("attention_factor", attention_factor),
        beta_fast=fast,
        beta_slow=slow,
        truncate=scaling.flag("truncate", True),
    )
