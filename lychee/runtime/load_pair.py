"""Loads a target and its draft: opened and checked together before any weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from lychee.models.llama import Llama
from lychee.models.model_files import FLOATS, OpenedModel, is_model, open_model
from lychee.models.names import DRAFTS, resolve_model
from lychee.models.quant_format import ALLOWED, QuantFormat
from lychee.models.tokenizer import Tokenizer, check_pair
from lychee.models.tokenizer_files import load_tokenizer
from lychee.models.wheels import WHEELS

from .checks import ParameterError, refuse


@dataclass(frozen=True)
class Pair:
    """`path`: where the target is. `vocab`: token ids that may be emitted. `notes`: what a user should know."""

    path: Path
    tokenizer: Tokenizer
    target: Llama
    draft: Llama | None
    vocab: int
    notes: tuple[str, ...]


def load_pair(
    model: object,
    draft_model: object,
    device: torch.device,
    dtype: torch.dtype | None,
    target_quant: str | None,
    draft_quant: str | None,
) -> Pair:
    """Paths and names as LLM takes them; `dtype` None is the checkpoint's. Raises ParameterError or ModelError."""
    path = model_path("model", model)
    target = opened("target_quant", path, dtype, target_quant)
    if target.config.output_vocab:
        raise ParameterError(f"model {path} is a draft that shares its target's embedding: give it as draft_model")
    tokenizer = load_tokenizer(path)
    vocab = min(tokenizer.size, target.config.vocab_size)
    if draft_model is None:
        if draft_quant is not None:
            raise ParameterError(f"draft_quant is {draft_quant!r} without a draft_model")
        return Pair(path, tokenizer, Llama.of(target, device, dtype), None, vocab, _notes(target))
    draft_path = model_path("draft_model", draft_model)
    draft = opened("draft_quant", draft_path, dtype, draft_quant)
    check_fit(tokenizer, vocab, target, draft)
    loaded = Llama.of(target, device, dtype)
    return Pair(path, tokenizer, loaded, Llama.of(draft, device, dtype, target=loaded), vocab, _notes(target, draft))


def _notes(*opened: OpenedModel) -> tuple[str, ...]:
    return tuple(model.note for model in opened if model.note)


def opened(argument: str, path: Path, dtype: torch.dtype | None, quant: str | None) -> OpenedModel:
    """`open_model`. Raises ParameterError too: `argument` has a `quant` that there is not."""
    if quant not in (None, FLOATS):
        try:
            QuantFormat.parse(str(quant))
        except ValueError:
            raise refuse(argument, quant, f"None for what the files have, {FLOATS} for floats, {ALLOWED}") from None
    return open_model(path, dtype, quant)


def check_fit(tokenizer: Tokenizer, vocab: int, target: OpenedModel, draft: OpenedModel) -> None:
    """A draft must have the target's tokens; one that shares its embedding must have its sizes."""
    ours, theirs = target.config, draft.config
    if theirs.output_vocab:
        for name in ("vocab_size", "hidden_size"):
            if getattr(theirs, name) != getattr(ours, name):
                raise ParameterError(
                    f"draft_model {draft.path} shares its target's embedding and has {name} {getattr(theirs, name)} "
                    f"where the model has {getattr(ours, name)}"
                )
        return
    try:
        check_pair(tokenizer, load_tokenizer(draft.path))
    except ValueError as error:
        raise ParameterError(f"draft_model {draft.path} does not fit the model: {error}") from error
    if theirs.vocab_size < vocab:
        raise ParameterError(f"draft_model has vocab_size {theirs.vocab_size}, must hold the target's {vocab} tokens")


def model_path(argument: str, given: object) -> Path:
    """Of a path or a name, as LLM takes it. Raises ParameterError or ModelError."""
    path = resolve_model(given) if isinstance(given, (str, Path)) else None
    if path is None or not is_model(path):
        known = ", ".join((*WHEELS, *DRAFTS, "OWNER/NAME"))
        shown = str(given) if isinstance(given, Path) else given
        what = f"a model directory or a GGUF file on this machine, or a name that `lychee get` knows: {known}"
        raise refuse(argument, shown, what)
    return path
