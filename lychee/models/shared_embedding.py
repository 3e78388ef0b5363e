"""Drafts that share their target's embedding: their files hold layers alone, and which tokens they can propose.

config.json has `"lychee_draft": {"shares_embedding": true, "output_vocab": N}`. Beside the layers and the norm,
model.safetensors has `output_ids` [N] int64, ascending ids of the tokens that the draft has logits for, and
`embed_probe` [16, hidden] fp16, rows of the embedding it was trained on at ids that divide the vocabulary evenly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .fields import Fields
from .files import ModelError
from .projection import AnyWeight, embedded, rows_of

KEY = "lychee_draft"
PROBED = 16
# Largest relative distance of a probed row from the target's: a quantised embedding is nearer, another one is not.
MOST_OFF = 0.25


def output_vocab(config: Fields, vocab_size: int) -> int:
    """Number of tokens that a draft has logits for; 0 where the model has an embedding of its own."""
    given = config.values.get(KEY)
    if given is None:
        return 0
    if not isinstance(given, dict) or given.keys() != {"shares_embedding", "output_vocab"}:
        raise config.refuse(KEY, 'an object {"shares_embedding": true, "output_vocab": N}')
    number = given["output_vocab"]
    if given["shares_embedding"] is not True or type(number) is not int or not 1 <= number <= vocab_size:
        raise config.refuse(KEY, f"shares_embedding true and output_vocab from 1 to vocab_size ({vocab_size})")
    return number


def head_of(
    head: AnyWeight, embed: AnyWeight, tensors: Mapping[str, Tensor], vocab_size: int, where: str
) -> tuple[AnyWeight, Tensor]:
    """The rows of the target's head that the draft uses, and `output_of` [vocab_size] int32 for `spread_logits`.

    Raises ModelError where the ids are no ascending ids or the target's embedding is another one.
    """
    ids, probe = tensors["output_ids"].long(), tensors["embed_probe"].float()
    if len(ids) == 0 or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size or bool((ids.diff() <= 0).any()):
        raise ModelError(f"{where}: output_ids must be ascending token ids below vocab_size ({vocab_size})")
    probed = torch.arange(PROBED) * vocab_size // PROBED
    like = torch.empty(probe.shape[1], device=ids.device)
    ours = embedded(probed.int().to(ids.device), embed, like).float()
    off = float((ours - probe.to(ours)).norm() / probe.norm().clamp(min=1e-9))
    if not off <= MOST_OFF:
        raise ModelError(
            f"{where}: embed_probe is {off:.0%} off the target's embedding, may be {MOST_OFF:.0%} at most: this draft "
            "was made for another model"
        )
    output_of = torch.full((vocab_size,), -1, dtype=torch.int32, device=ids.device)
    output_of[ids] = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
    return rows_of(head, ids), output_of


def companions(number: int, hidden: int) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Shape and dtypes of the tensors that such a draft's file has besides its layers."""
    return {"output_ids": ((number,), ("I64",)), "embed_probe": ((PROBED, hidden), ("F16",))}


def refuse_without_target(where: Any) -> ModelError:
    return ModelError(f"{where} is a draft that shares its target's embedding: it cannot be loaded as a target")
