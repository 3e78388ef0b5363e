"""Second half of process_logits: temperature, min_p, top_k, top_p and the logarithm of the softmax."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernel import kernel
from .types import NEVER, SamplingTensors


def filtered(x: Tensor, sampling: SamplingTensors, seq: Tensor) -> Tensor:
    """The face in torch, of rows whose largest value is 0."""
    x = x / sampling.temperature[seq, None]
    min_p, top_k, top_p = sampling.min_p[seq, None], sampling.top_k[seq, None], sampling.top_p[seq, None]
    if bool((min_p > 0).any()):
        x = x.masked_fill(x < min_p.log(), NEVER)
    has_k, has_p = (top_k > 0) & (top_k < x.shape[1]), top_p < 1
    if bool((has_k | has_p).any()):
        # NumPy sorts with vector instructions, many times faster than torch on the CPU.
        ordered = torch.from_numpy(np.sort(x.cpu().numpy())).to(x.device).flip(-1)
        edge = ordered.gather(1, torch.where(has_k, top_k - 1, x.shape[1] - 1).long())
        mass = ordered.masked_fill(ordered < edge, NEVER).softmax(-1)
        outside = has_p & (mass.cumsum(-1) - mass >= top_p)
        edge = torch.maximum(edge, ordered.masked_fill(outside, 0.0).amin(-1, keepdim=True))
        x = x.masked_fill(x < edge, NEVER)
    return x - x.exp().sum(-1, keepdim=True).clamp(min=1).log()


@triton.jit
def _below_largest(x_ptr, first, largest, temperature, vocab, BLOCK_V: tl.constexpr):
    """(largest - x) / temperature >= +0, infinite for banned tokens and past the vocabulary."""
    offs_v = first + tl.arange(0, BLOCK_V)
    x = tl.load(x_ptr + offs_v, mask=offs_v < vocab, other=float("-inf"))
    return tl.div_rn(largest - x, temperature)


@triton.jit
def _last_key(x_ptr, largest, temperature, vocab, budget, COUNT: tl.constexpr, BLOCK_V: tl.constexpr):
    """The largest key such that tokens of smaller keys number, or weigh, less than budget.

    A key is the bit pattern of `_below_largest`: non-negative floats order like their bits.
    """
    low = 0
    high = 0x7F800001
    for _ in range(31):
        middle = low + (high - low) // 2
        measure = tl.zeros([BLOCK_V], tl.float32)
        for first in range(0, vocab, BLOCK_V):
            below = _below_largest(x_ptr, first, largest, temperature, vocab, BLOCK_V)
            weight = tl.full([BLOCK_V], 1.0, tl.float32) if COUNT else tl.exp(-below)
            measure += tl.where(below.to(tl.int32, bitcast=True) < middle, weight, 0.0)
        fits = tl.sum(measure, axis=0) < budget
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle)
    return low


@triton.jit
def _mass(x_ptr, largest, temperature, vocab, last, BLOCK_V: tl.constexpr):
    """Sum of exp(-below) over keys up to last."""
    mass = tl.zeros([BLOCK_V], tl.float32)
    for first in range(0, vocab, BLOCK_V):
        below = _below_largest(x_ptr, first, largest, temperature, vocab, BLOCK_V)
        mass += tl.where(below.to(tl.int32, bitcast=True) <= last, tl.exp(-below), 0.0)
    return tl.sum(mass, axis=0)


@kernel
def filter_kernel(
    x_ptr,  # [num_rows, vocab], in place
    seq_idx_ptr,  # [num_rows]
    temperature_ptr,  # [num_seqs]
    top_k_ptr,  # [num_seqs]
    top_p_ptr,  # [num_seqs]
    min_p_ptr,  # [num_seqs]
    vocab,
    greedy_below,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * vocab
    seq = tl.load(seq_idx_ptr + row).to(tl.int64)
    maxima = tl.full([BLOCK_V], float("-inf"), tl.float32)
    for first in range(0, vocab, BLOCK_V):
        offs_v = first + tl.arange(0, BLOCK_V)
        maxima = tl.maximum(maxima, tl.load(x_ptr + offs_v, mask=offs_v < vocab, other=float("-inf")))
    largest = tl.max(maxima, axis=0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    temperature = tl.load(temperature_ptr + seq)
    last = 0x7F7FFFFF  # all but the banned
    log_mass = 0.0
    if temperature < greedy_below:
        temperature = 1.0
    else:
        top_k = tl.load(top_k_ptr + seq)
        top_p = tl.load(top_p_ptr + seq)
        min_p = tl.load(min_p_ptr + seq)
        if min_p > 0:
            last = (0.0 - tl.log(min_p)).to(tl.int32, bitcast=True)
        if (top_k > 0) & (top_k < vocab):
            last = tl.minimum(last, _last_key(x_ptr, largest, temperature, vocab, top_k, True, BLOCK_V))
        if top_p < 1:
            budget = top_p * _mass(x_ptr, largest, temperature, vocab, last, BLOCK_V)
            last = _last_key(x_ptr, largest, temperature, vocab, budget, False, BLOCK_V)  # never beyond last
        log_mass = tl.log(tl.maximum(_mass(x_ptr, largest, temperature, vocab, last, BLOCK_V), 1.0))
    for first in range(0, vocab, BLOCK_V):
        offs_v = first + tl.arange(0, BLOCK_V)
        below = _below_largest(x_ptr, first, largest, temperature, vocab, BLOCK_V)
        kept = below.to(tl.int32, bitcast=True) <= last
        tl.store(x_ptr + offs_v, tl.where(kept, -below - log_mass, float("-inf")), mask=offs_v < vocab)
