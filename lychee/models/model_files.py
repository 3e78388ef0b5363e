"""Opens a model from a path: a Hugging Face directory, a GGUF file, or a directory that holds one."""

from __future__ import annotations

from pathlib import Path

import torch

from .config import ModelConfig
from .files import ModelError
from .gguf_checkpoint import GGUFCheckpoint
from .gguf_config import config_values
from .gguf_file import GGUFFile
from .safetensors_io import INDEX, SINGLE, Checkpoint
from .tensor_source import TensorSource

SUFFIX = ".gguf"


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


def open_model(path: Path, dtype: torch.dtype | None = None) -> tuple[ModelConfig, TensorSource]:
    """The config, and the checkpoint with its headers checked. Raises ModelError.

    A GGUF file's tensors are given as floats of `dtype`, None being the config's.
    """
    file = gguf_path(path)
    if file is None:
        return ModelConfig.load(path), Checkpoint.open(path)
    opened = GGUFFile.open(file)
    config = ModelConfig.parse(config_values(opened), where=str(file))
    return config, GGUFCheckpoint.open(opened).as_floats(dtype or config.dtype)
