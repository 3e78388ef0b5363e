"""Opens the tokenizer of a model directory or of a GGUF file."""

from __future__ import annotations

from pathlib import Path

from .files import ModelError
from .gguf_file import GGUFFile
from .gguf_tokenizer import gguf_tokenizer
from .json_tokenizer import json_tokenizer
from .model_files import gguf_path
from .sentencepiece_tokenizer import sentencepiece_tokenizer
from .tokenizer import Tokenizer
from .tokenizer_config import TokenizerConfig


def load_tokenizer(path: str | Path) -> Tokenizer:
    """From a GGUF file, else from a directory's tokenizer.json or, without one, tokenizer.model. Raises ModelError."""
    path = Path(path)
    if file := gguf_path(path):
        return gguf_tokenizer(GGUFFile.open(file))
    config = TokenizerConfig.load(path)
    if (path / "tokenizer.json").is_file():
        return json_tokenizer(path / "tokenizer.json", config)
    if (path / "tokenizer.model").is_file():
        return sentencepiece_tokenizer(path / "tokenizer.model", config)
    raise ModelError(f"{path} has neither tokenizer.json nor tokenizer.model")
