"""Models of the Hugging Face hub, through `huggingface_hub` where it is installed, with its cache and settings."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .files import ModelError
from .model_files import SUFFIX

EXTRA = "lychee-decode[hub]"
# Weights that run no code when they are read, and what is read beside them.
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
GGUF = re.compile(r"[\w.-]+\.gguf")
BESIDE = re.compile(r"[\w.-]+\.json|tokenizer\.model|chat_template\.jinja")


def fetch_snapshot(repo: str, gguf: str | None = None) -> Path:
    """Download the model's files, or the one GGUF file, that are not in the hub's cache yet. Raises ModelError."""
    library = _library()
    if library is None:
        raise ModelError(f"{repo} is a hub model, which needs huggingface_hub: pip install '{EXTRA}'")
    try:
        names = library.list_repo_files(repo)
        wanted = wanted_files(repo, names, gguf)
        directory = Path(library.snapshot_download(repo, allow_patterns=wanted))
    except ModelError:
        raise
    except Exception as error:  # of the library, of its HTTP client, or of the system
        said = str(error).strip().splitlines()
        raise ModelError(f"{repo} could not be fetched: {said[0][:300] if said else type(error).__name__}") from error
    return directory / wanted[0] if wanted[0].endswith(SUFFIX) else directory


def fetched_snapshot(repo: str, gguf: str | None = None) -> Path | None:
    """Where the hub's cache has the model, or its GGUF file; None where it has not. Nothing is downloaded."""
    library = _library()
    if library is None:
        return None
    try:
        directory = Path(library.snapshot_download(repo, local_files_only=True))
    except Exception:  # each version of the library has its own
        return None
    found = directory / gguf if gguf else directory
    return found if found.exists() else None


def wanted_files(repo: str, names: Sequence[str], gguf: str | None) -> list[str]:
    """Names of files at the top of the repository: safetensors and what belongs to them, or a single GGUF file."""
    found = [name for name in names if GGUF.fullmatch(name)]
    if gguf is not None:
        if gguf not in found:
            raise ModelError(f"{repo} has no {gguf}; it has {', '.join(sorted(found)) or 'no GGUF file'}")
        return [gguf]
    if any(WEIGHTS.fullmatch(name) for name in names):
        return [name for name in names if WEIGHTS.fullmatch(name) or BESIDE.fullmatch(name)]
    if not found:
        raise ModelError(f"{repo} has neither safetensors nor a GGUF file; files of other kinds are not read")
    if len(found) > 1:
        raise ModelError(f"{repo} has several GGUF files; get one of them, as {repo}/{sorted(found)[0]}")
    return found


def _library() -> Any:
    """huggingface_hub, or None where it is not installed."""
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        return None
