"""Names of a model's tensors, for the text of its programs."""

from __future__ import annotations

from .kv_cache import KVCache
from .llama import Llama
from .projection import Projection, parts


def constant_names(model: Llama, kv: KVCache) -> dict[int, str]:
    """By the address of a tensor, of a quantised weight that of its first part: `layers.3.down`, `layers.3.keys`."""
    weights = model.weights
    names = {parts(weights.lm_head)[0].data_ptr(): "lm_head", parts(weights.embed)[0].data_ptr(): "embed"}
    names |= {weights.norm.data_ptr(): "norm", model.rope.data_ptr(): "rope"}
    if weights.output_of is not None:
        names[weights.output_of.data_ptr()] = "output_of"
    for i, (layer, cache) in enumerate(zip(weights.layers, kv.layers, strict=True)):
        for name, part in vars(layer).items():
            if isinstance(part, Projection):
                names[parts(part.weight)[0].data_ptr()] = f"layers.{i}.{name}"
                if part.bias is not None:
                    names[part.bias.data_ptr()] = f"layers.{i}.{name}.bias"
            elif part is not None:
                names[part.data_ptr()] = f"layers.{i}.{name}"
        names |= {cache[0].data_ptr(): f"layers.{i}.keys", cache[1].data_ptr(): f"layers.{i}.values"}
    return names
