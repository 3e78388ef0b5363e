"""Round to nearest with clipping that minimises the squared error: floats to int8 and int4 weights.

Each group of weights tries a few ranges, narrower and narrower, and keeps the one whose values come closest; the first
is the plain one, so that the error is never larger than without the search.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from lychee.kernels.quantized import RUN, dequantize
from lychee.kernels.types import Int4Weight, Int8Weight

from .files import ModelError
from .quant_format import QuantFormat

CHUNK = 1 << 18  # weights searched at a time: they stay in the cache
LARGEST = 1e15  # squares of larger weights overflow
INT8_LEVELS = (127.0, 134.0)  # where the largest weight is put; past 127 it is clipped
INT4_LEVELS = (7.0, 7.5, 8.0, 8.5, 9.0, 9.6, 10.3, 11.2)
SHRINKS = (0.0, 0.04, 0.08)  # of the range, cut from either end
HALF = (2.0**-13, 2.0**15)  # scales that float16 holds in full precision, whatever the search makes of them
HALF_MINIMUM = 512  # largest minimum in units of its scale: float16 rounds it by an eighth of a step at most


@dataclass(frozen=True)
class Affine:
    """w = scale * q + low, a row per group: [num_groups, 1] in float32."""

    scale: Tensor
    low: Tensor


def quantize(weight: Tensor, fmt: QuantFormat, name: str = "weight") -> Int8Weight | Int4Weight:
    """`weight` [out_features, in_features] of any float dtype, on its own device.

    Scales are float16, or float32 where float16 cannot hold them all; those of "zero" are float32 and short enough
    that -scale * zero is exact. Raises ModelError, which calls the tensor `name`, where a weight is not finite or is
    above 1e15, or a row is no whole number of groups.
    """
    if weight.dim() != 2 or not weight.is_floating_point() or 0 in weight.shape:
        raise ModelError(f"{name} is {weight.dtype} {list(weight.shape)}, must be a matrix of floats")
    rows, in_features = weight.shape
    if not fmt.fits(in_features):
        raise ModelError(fmt.refusal(name, in_features))
    step = max(CHUNK // in_features, 1)
    starts = range(0, rows, step)
    group = fmt.group or in_features
    fits_half = [_check(weight[i : i + step].float().reshape(-1, group), fmt, name) for i in starts]
    dtype = torch.float16 if all(fits_half) and fmt.kind != "zero" else torch.float32
    made = [_quantize_rows(weight[i : i + step].float(), group, fmt, dtype) for i in starts]
    values, scales, lows = (torch.cat(parts) for parts in zip(*made, strict=True))
    if fmt.bits == 8:
        return Int8Weight(values, scales)
    return Int4Weight(values, scales, None if fmt.kind == "sym" else lows)


def pack_int4(q: Tensor) -> Tensor:
    """uint8 [out_features, in_features] of numbers up to 15, two in a byte: [out_features, in_features / 2]."""
    halves = q.view(len(q), -1, 2, RUN)
    packed: Tensor = halves[:, :, 0] | halves[:, :, 1] << 4
    return packed.flatten(1)


def relative_error(weight: Tensor, made: Int8Weight | Int4Weight) -> float:
    """|weight - made| / |weight| in the Euclidean norm; 0 where both are 0."""
    step = max(CHUNK // weight.shape[1], 1)
    missed = total = 0.0
    for i in range(0, len(weight), step):
        floats = weight[i : i + step].float()
        missed += (dequantize(_rows(made, i, i + step)) - floats).square_().sum().item()
        total += floats.square().sum().item()
    return float((missed / total if total else missed) ** 0.5)


def _rows(weight: Int8Weight | Int4Weight, start: int, stop: int) -> Int8Weight | Int4Weight:
    scales = weight.scales[start:stop]
    if isinstance(weight, Int8Weight):
        return Int8Weight(weight.values[start:stop], scales)
    minimums = None if weight.minimums is None else weight.minimums[start:stop]
    return Int4Weight(weight.packed[start:stop], scales, minimums)


def _check(x: Tensor, fmt: QuantFormat, name: str) -> bool:
    """Refuse what cannot be quantised; whether float16 holds the parameters of these groups [num_groups, group]."""
    largest = x.abs().amax().item()
    if not largest <= LARGEST:
        raise ModelError(f"{name} has the weight {largest:g}, must have finite ones of at most {LARGEST:g}")
    plain = next(_candidates(x, fmt, torch.float32))
    scale, low = plain.scale.abs(), torch.zeros_like(plain.scale) if fmt.kind == "sym" else plain.low.abs()
    fits = (scale >= HALF[0]) & (scale <= HALF[1]) & (low <= HALF_MINIMUM * scale) & (low <= HALF[1])
    return bool((fits | ((scale == 0) & (low == 0))).all())


def _quantize_rows(x: Tensor, group: int, fmt: QuantFormat, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Values (packed where they have 4 bits), scales and minimums of a few rows."""
    groups = x.reshape(-1, group)
    best = _search(groups, fmt, dtype)
    q = _round(groups, best, fmt).view(x.shape)
    scales, lows = (part.to(dtype).view(len(x), -1) for part in (best.scale, best.low))
    return q.to(torch.int8) if fmt.bits == 8 else pack_int4(q.to(torch.uint8)), scales, lows


def _search(x: Tensor, fmt: QuantFormat, dtype: torch.dtype) -> Affine:
    """The candidate of least squared error for each group."""
    candidates = _candidates(x, fmt, dtype)
    best = next(candidates)
    least = _squared_error(x, best, fmt)
    for tried in candidates:
        error = _squared_error(x, tried, fmt)
        better = error < least
        least = torch.where(better, error, least)
        best = Affine(torch.where(better, tried.scale, best.scale), torch.where(better, tried.low, best.low))
    return best


def _round(x: Tensor, by: Affine, fmt: QuantFormat) -> Tensor:
    """The q nearest to each weight, as floats."""
    least, most = (-127, 127) if fmt.bits == 8 else (0, 15)
    divisor = torch.where(by.scale == 0, 1.0, by.scale)
    return (x - by.low).div_(divisor).round_().clamp_(least, most)


def _squared_error(x: Tensor, by: Affine, fmt: QuantFormat) -> Tensor:
    return _round(x, by, fmt).mul_(by.scale).add_(by.low).sub_(x).square_().sum(1, keepdim=True)


def _candidates(x: Tensor, fmt: QuantFormat, dtype: torch.dtype) -> Iterator[Affine]:
    """Scales and minimums as they will be stored, the plain ones first."""
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    if fmt.kind == "sym":
        # Of the largest magnitude and its sign, so that it meets the end of int4 that reaches further.
        largest = torch.where(high > -low, high, low)
        for level in INT8_LEVELS if fmt.bits == 8 else INT4_LEVELS:
            scale = (largest / -level).to(dtype).float()
            yield Affine(scale, torch.zeros_like(scale) if fmt.bits == 8 else -8 * scale)
    elif fmt.kind == "min":
        for bottom, top in product(SHRINKS, SHRINKS):
            start = (low + bottom * (high - low)).to(dtype).float()
            yield Affine(((high - top * (high - low) - start) / 15).to(dtype).float(), start)
    else:
        low, high = low.clamp(max=0), high.clamp(min=0)
        for bottom, top in product(SHRINKS, SHRINKS):
            scale = _short((high * (1 - top) - low * (1 - bottom)) / 15)
            zero = (low * (bottom - 1) / torch.where(scale == 0, 1.0, scale)).round_().clamp_(0, 15)
            yield Affine(scale, -scale * zero)


def _short(scale: Tensor) -> Tensor:
    """Rounded to 20 bits of mantissa, so that products with numbers up to 15 are exact in float32."""
    return ((scale.view(torch.int32) + 8) & ~15).view(torch.float32)
