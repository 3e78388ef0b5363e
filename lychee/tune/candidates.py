"""Models before their weights are read: what they are called, how large they are, and whether a draft fits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..models.model_files import OpenedModel
from ..models.size import num_parameters, weight_bytes
from ..models.tokenizer_files import load_tokenizer
from ..runtime.checks import ParameterError
from ..runtime.load_pair import check_fit, model_path, opened
from ..runtime.memory_plan import free_memory
from .found import Unfit

PACKAGED = "packaged draft"


@dataclass(frozen=True)
class Candidate:
    """given: as on the command line; None is the packaged one. bytes: of its weights in memory."""

    given: str | None
    path: Path
    model: OpenedModel
    bytes: int

    @classmethod
    def of(
        cls, given: str | None, packaged: Path, argument: str, dtype: torch.dtype | None, quant: str | None
    ) -> Candidate:
        """Raises ParameterError or ModelError where there is no such model, or its files are damaged."""
        path = packaged if given is None else model_path("model" if argument == "target" else "draft_model", given)
        model = opened(f"{argument}_quant", path, dtype, quant)
        return cls(given, path, model, weight_bytes(model, dtype or model.config.dtype))

    @property
    def name(self) -> str:
        return PACKAGED if self.given is None else Path(self.given).name

    @property
    def parameters(self) -> int:
        return num_parameters(self.model.config)


def check_memory(target: Candidate, device: torch.device) -> None:
    """Raises ParameterError where there is no room for the target alone."""
    if why := _lacking(target.bytes, device):
        raise ParameterError(f"model {target.path} does not fit in memory: {why}")


def misfit(target: Candidate, draft: Candidate, device: torch.device) -> Unfit | None:
    """Why the draft cannot go with the target, neither of which is loaded."""
    tokenizer = load_tokenizer(target.path)
    vocab = min(tokenizer.size, target.model.config.vocab_size)
    try:
        check_fit(tokenizer, vocab, target.model, draft.model)
    except ParameterError as error:
        return Unfit("tokenizer", str(error))
    if why := _lacking(target.bytes + draft.bytes, device):
        return Unfit("memory", f"{draft.name} does not fit beside the target: {why}")
    return None


def _lacking(wanted: int, device: torch.device) -> str | None:
    if wanted <= (free := free_memory(device)):
        return None
    return f"weights take {wanted / 2**20:,.0f} MiB, and {free / 2**20:,.0f} MiB are free"
