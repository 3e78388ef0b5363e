"""Opens the tokenizer of a model directory."""

from __future__ import annotations

from pathlib import Path

from .files import ModelError
from .json_tokenizer import json_tokenizer
from .sentencepiece_tokenizer import sentencepiece_tokenizer
from .tokenizer import Tokenizer
from .tokenizer_config import TokenizerConfig


def load_tokenizer(path: str | Path) -> Tokenizer:
    """From tokenizer.json if there is one, else from tokenizer.model. Raises ModelError."""
    path = Path(path)
    config = TokenizerConfig.load(path)
    if (path / "tokenizer.json").is_file():
        return json_tokenizer(path / "tokenizer.json", config)
    if (path / "tokenizer.model").is_file():
        return sentencepiece_tokenizer(path / "tokenizer.model", config)
    raise ModelError(f"{path} has neither tokenizer.json nor tokenizer.model")
