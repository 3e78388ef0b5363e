"""Writes safetensors one tensor at a time, in files of bounded size: memory holds no more than the tensor at hand."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .safetensors_io import INDEX, SINGLE

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}


class SafetensorsWriter:
    """Files of at most `shard_bytes`, unless one tensor has more; `close` names them and writes the index.

    Until a file is complete its data lie in one part per item size: the format has no gaps, and readers need each
    tensor aligned, so the wide ones come first.
    """

    def __init__(self, path: Path, shard_bytes: int = 4_000_000_000) -> None:
        self.path, self.shard_bytes = path, shard_bytes
        self._shards: list[list[str]] = []
        self._headers: dict[int, dict[str, dict[str, Any]]] = {}
        self._sizes: Counter[int] = Counter()
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.element_size()
        if self._headers and self._sizes.total() + tensor.nbytes > self.shard_bytes:
            self._finish_shard()
        start = self._sizes[size]
        self._sizes[size] += tensor.nbytes
        self._headers.setdefault(size, {})[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.nbytes],
        }
        with open(self._part(size), "ab") as part:
            part.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Finish the last file. One file is model.safetensors; several have an index."""
        self._finish_shard()
        if len(self._shards) == 1:
            self._shard(0).rename(self.path / SINGLE)
            return
        files = [f"model-{i + 1:05d}-of-{len(self._shards):05d}.safetensors" for i in range(len(self._shards))]
        for i, file in enumerate(files):
            self._shard(i).rename(self.path / file)
        weight_map = {name: files[i] for i, names in enumerate(self._shards) for name in names}
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        (self.path / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")

    def _finish_shard(self) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        base = 0
        for size in sorted(self._headers, reverse=True):
            for name, entry in self._headers[size].items():
                header[name] = {**entry, "data_offsets": [base + at for at in entry["data_offsets"]]}
            base += self._sizes[size]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(self._shard(len(self._shards)), "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for size in sorted(self._headers, reverse=True):
                with open(self._part(size), "rb") as part:
                    shutil.copyfileobj(part, out, 1 << 22)
                self._part(size).unlink()
        self._shards.append([name for headers in self._headers.values() for name in headers])
        self._total += base
        self._headers, self._sizes = {}, Counter()

    def _part(self, item_bytes: int) -> Path:
        return self.path / f"part-{item_bytes}"

    def _shard(self, index: int) -> Path:
        return self.path / f"shard-{index}"
