"""Which model a path holds: a digest by which a file that was made for it knows it again."""

from __future__ import annotations

import hashlib
from pathlib import Path

ENDS = 1 << 16  # bytes that are read at a file's beginning and end: weights are too large to be read whole
SUFFIXES = (".json", ".safetensors", ".gguf", ".model")


def fingerprint(path: Path) -> str:
    """Of a GGUF file, or of a directory's model files: their names, sizes, beginnings and ends. Raises OSError."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(ENDS))
            opened.seek(max(0, size - ENDS))
            digest.update(opened.read(ENDS))
    return digest.hexdigest()
