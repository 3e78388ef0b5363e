"""Weights of scales * (q - zero) in groups of any size as lychee's own, value for value."""

from __future__ import annotations

import torch
from torch import Tensor

from lychee.kernels.types import Int4Weight, Int8Weight

from .files import ModelError
from .quantize import pack_int4

RUNS = (128, 64, 32)  # elements of a row that may share a scale in an Int4Weight


def run_groups(where: str, g_idx: Tensor, num_groups: int, runs: tuple[int, ...] = RUNS) -> Tensor:
    """The group of each aligned run of the row, for the longest run whose elements share one: int64 [num_runs].

    `g_idx` [in_features] is each element's group. Raises ModelError where no run is that uniform.
    """
    if int(g_idx.min()) < 0 or int(g_idx.max()) >= num_groups:
        raise ModelError(f"{where}.g_idx must be from 0 to {num_groups - 1}")
    for run in runs:
        if len(g_idx) % run == 0 and bool((g_idx.view(-1, run) == g_idx[::run, None]).all()):
            return g_idx[::run].long()
    raise ModelError(
        f"{where}.g_idx puts in_features of several groups side by side (desc_act), must have groups of at least "
        f"{runs[-1]} neighbours: quantise with desc_act false, or with static groups"
    )


def int4_weight(q: Tensor, scales: Tensor, zeros: Tensor, runs: Tensor) -> Int4Weight:
    """From q [out_features, in_features], scales and zeros [num_groups, out_features], and the group of each run.

    The minimums -scale * zero are exact in float32 for scales of 16 bits. Where every zero is 8 there are none.
    """
    by_run = scales[runs].T.contiguous()
    if bool((zeros == 8).all()):
        return Int4Weight(pack_int4(q), by_run if by_run.dtype is torch.float16 else by_run.float(), None)
    by_run = by_run.float()
    return Int4Weight(pack_int4(q), by_run, -by_run * zeros[runs].T)


def int8_weight(q: Tensor, scales: Tensor, runs: Tensor) -> Int8Weight:
    """From q [out_features, in_features] whose zero is 128, scales [num_groups, out_features] and runs of 32 or one."""
    by_run = scales[runs].T.contiguous()
    return Int8Weight((q ^ 128).view(torch.int8), by_run if by_run.dtype is torch.float16 else by_run.float())
