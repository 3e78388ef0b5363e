"""Opens a model from a path: a Hugging Face directory, a GGUF file, or a directory that holds one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from .config import ModelConfig
from .files import ModelError, read_json
from .gguf_checkpoint import GGUFCheckpoint
from .gguf_config import config_values
from .gguf_file import GGUFFile
from .open_checkpoint import open_checkpoint
from .quant_format import QuantFormat
from .quantized_on_load import quantized_on_load
from .safetensors_io import INDEX, SINGLE
from .tensor_source import TensorSource

SUFFIX = ".gguf"
FLOATS = "none"


def gguf_path(path: Path) -> Path | None:
    """The GGUF file that the path names, or holds without safetensors beside it. Raises ModelError if it holds many."""
    if path.is_file() and path.suffix == SUFFIX:
        return path
    if not path.is_dir() or any((path / name).is_file() for name in (SINGLE, INDEX)):
        return None
    found = sorted(file.name for file in path.iterdir() if file.suffix == SUFFIX and file.is_file())
    if len(found) > 1:
        raise ModelError(f"{path} holds {', '.join(found)}; name one of these files")
    return path / found[0] if found else None


def is_model(path: Path) -> bool:
    """Whether there is anything at the path that may be a model."""
    return path.is_dir() or (path.is_file() and path.suffix == SUFFIX)


@dataclass(frozen=True)
class OpenedModel:
    """A model whose headers are read and checked, and no tensor yet. `note`: what its user should know, if anything."""

    path: Path
    config: ModelConfig
    source: TensorSource
    note: str | None = None


def open_model(path: Path, dtype: torch.dtype | None = None, quant: str | None = None) -> OpenedModel:
    """Raises ModelError, and ValueError for a `quant` that there is not.

    `quant`: how its matrices are to be: None as the files have them; `none` as floats; or a QuantFormat's name. A GGUF
    file's floats are of `dtype`, None being the config's.
    """
    fmt = None if quant in (None, FLOATS) else QuantFormat.parse(str(quant))
    note: str | None = None
    source: TensorSource
    if file := gguf_path(path):
        opened = GGUFFile.open(file)
        config = ModelConfig.parse(config_values(opened), where=str(file))
        checkpoint = GGUFCheckpoint.open(opened)
        source = checkpoint if quant is None else checkpoint.as_floats(dtype or config.dtype)
        note = checkpoint.note if quant is None else None
    else:
        config = ModelConfig.load(path)
        values = read_json(path / "config.json")
        source = open_checkpoint(path, values)
        if quant == FLOATS and values.get("quantization_config") is not None:
            raise ModelError(f"{path} is quantised, and only a GGUF file's weights are read as floats")
    if fmt is not None:
        source = quantized_on_load(source, fmt, config.tie_word_embeddings)
    return OpenedModel(path, config, source, note)
