"""Attention of one new token a row over rows of differing lengths: a small C++ loop on the CPU, PyTorch elsewhere."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SOURCE = Path(__file__).with_name("attention.cpp")


@functools.cache
def library() -> Any:
    """The compiled loop, or None without a compiler."""
    if not shutil.which("g++"):
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "attention.so"
        flags = ["-O3", "-march=native", "-ffast-math", "-mprefer-vector-width=512", "-shared", "-fPIC"]
        built = subprocess.run(["g++", *flags, "-o", file, SOURCE], capture_output=True)
        return None if built.returncode else ctypes.CDLL(str(file))


def attend(q: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
    """``q`` is (rows, KV heads, queries a KV head, size); a row sees its positions up to ``at``. Float32 in and out."""
    (rows, heads, share, size), positions = q.shape, keys.shape[2]
    if q.device.type == "cpu" and size == 64 and keys.dtype == torch.bfloat16 and library():
        q, out = (q * size**-0.5).contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
        scores = q.new_empty(share * positions)
        places = (ctypes.c_void_p(t.data_ptr()) for t in (q, keys, values, out, at, scores))
        library().attention(*places, rows, heads, share, positions)
        return out
    length = min(-(-int(at.max() + 1) // 64) * 64, positions)
    bias = torch.where(torch.arange(length, device=q.device) <= at[:, None], 0.0, float("-inf"))[:, None, None]
    bias = bias.to(keys.dtype).expand(-1, 1, share, -1)
    k, v = keys[:, :, :length], values[:, :, :length]
    return F.scaled_dot_product_attention(q.to(k.dtype), k, v, bias).float()
