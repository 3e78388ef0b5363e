"""The values of GGUF tensors: floats as they are, blocks of 4 and 8 bits as quantised weights, others converted.

A block of 32 weights holds, in this order (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h): Q8_0 a
float16 scale and 32 int8; Q4_0 a float16 scale and 16 bytes of two q each, w = scale * (q - 8); Q4_1 a float16 minimum
between the two, w = scale * q + minimum.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

from lychee.kernels.types import Int4Weight, Int8Weight

from .gguf_file import GGUFTensor

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
FLOATS = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
KEPT = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1)
GROUP = 32
CHUNK = 1 << 20  # weights dequantised at a time
LEAST_SCALE = 2.0**-24  # the smallest float16 above 0


@cache
def can_dequantise(kind: Kind) -> bool:
    """Whether the package has the arithmetic of this type."""
    try:
        quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def read_floats(path: Path, tensor: GGUFTensor, dtype: torch.dtype | None) -> Tensor:
    """The values, of `dtype`, or of the file's own where it is None: backed by the file if nothing is converted."""
    data = _mapped(path, tensor)
    if tensor.type in FLOATS:
        stored = torch.from_numpy(data).view(FLOATS[tensor.type]).view(tensor.shape)
        return stored if dtype is None else stored.to(dtype)
    made = torch.empty(tensor.shape, dtype=dtype or torch.float32).view(-1, tensor.shape[-1])
    rows = data.reshape(len(made), -1)
    step = max(CHUNK // tensor.shape[-1], 1)
    for start in range(0, len(made), step):
        made[start : start + step] = torch.from_numpy(quants.dequantize(rows[start : start + step], tensor.type))
    return made.view(tensor.shape)


def read_quantised(path: Path, tensor: GGUFTensor) -> Int8Weight | Int4Weight:
    """A matrix of a block type: Q8_0, Q4_0 and Q4_1 bit for bit, others rounded to int8 in groups of 32."""
    if tensor.type not in KEPT:
        return _rounded(path, tensor)
    rows, columns = tensor.shape
    blocks = torch.from_numpy(_mapped(path, tensor)).view(rows, columns // GROUP, -1)
    scales = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
    if tensor.type is Kind.Q8_0:
        return Int8Weight(blocks[..., 2:].contiguous().view(torch.int8).view(rows, columns), scales)
    minimums = None
    if tensor.type is Kind.Q4_1:
        minimums = blocks[..., 2:4].contiguous().view(torch.float16).squeeze(-1)
    return Int4Weight(blocks[..., -GROUP // 2 :].reshape(rows, columns // 2), scales, minimums)


def take_rows(weight: Int8Weight | Int4Weight, rows: Tensor) -> Int8Weight | Int4Weight:
    """The weight with its output rows in another order."""
    if isinstance(weight, Int8Weight):
        return Int8Weight(weight.values[rows], weight.scales[rows])
    minimums = None if weight.minimums is None else weight.minimums[rows]
    return Int4Weight(weight.packed[rows], weight.scales[rows], minimums)


def _mapped(path: Path, tensor: GGUFTensor) -> Bytes:
    """The tensor's bytes; writing to them, which nothing does, would not reach the file."""
    return np.memmap(path, np.uint8, "c", tensor.offset, (tensor.num_bytes,))


def _rounded(path: Path, tensor: GGUFTensor) -> Int8Weight:
    rows, columns = tensor.shape
    values = torch.empty(rows, columns, dtype=torch.int8)
    scales = torch.empty(rows, columns // GROUP, dtype=torch.float16)
    data = _mapped(path, tensor).reshape(rows, -1)
    step = max(CHUNK // columns, 1)
    for start in range(0, rows, step):
        chunk = slice(start, start + step)
        weights = torch.from_numpy(quants.dequantize(data[chunk], tensor.type)).view(-1, columns // GROUP, GROUP)
        scales[chunk] = weights.abs().amax(-1) / 127
        steps = weights / scales[chunk].float().clamp(min=LEAST_SCALE)[..., None]
        values[chunk] = steps.round().clamp(-127, 127).view(-1, columns)
    return Int8Weight(values, scales)
