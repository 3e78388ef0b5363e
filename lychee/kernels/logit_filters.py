"""Second part of process_logits: temperature, min_p, top_k, top_p and the logarithm of the softmax."""

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
def _below_largest(x_ptr, offs_v, largest, temperature, vocab):
    """(largest - x) / temperature >= +0, infinite for banned tokens and past the vocabulary."""
    x = tl.load(x_ptr + offs_v, mask=offs_v < vocab, other=float("-inf"))
    return tl.div_rn(largest - x, temperature)


@triton.jit
def _measure(x_ptr, maxima_ptr, largest, temperature, vocab, end, enough, COUNT: tl.constexpr, BLOCK_V: tl.constexpr):
    """How many tokens have keys before end, or what they weigh; no more is added once it is enough.

    A key is the bit pattern of `_below_largest`: non-negative floats order like their bits. Only blocks whose largest
    value is within reach are read.
    """
    reach = end.to(tl.float32, bitcast=True) * temperature * 1.0001 + 1e-30  # of any key before end, however rounded
    num_blocks = tl.cdiv(vocab, BLOCK_V)
    measure = 0.0
    block = 0
    while (block < num_blocks) & (measure < enough):
        if largest - tl.load(maxima_ptr + block) <= reach:
            offs_v = block * BLOCK_V + tl.arange(0, BLOCK_V)
            below = _below_largest(x_ptr, offs_v, largest, temperature, vocab)
            weight = tl.full([BLOCK_V], 1.0, tl.float32) if COUNT else tl.exp(-below)
            measure += tl.sum(tl.where(below.to(tl.int32, bitcast=True) < end, weight, 0.0), axis=0)
        block += 1
    return measure


@triton.jit
def _last_key(x_ptr, maxima_ptr, largest, temperature, vocab, budget, last, COUNT: tl.constexpr, BLOCK_V: tl.constexpr):
    """The largest key up to last such that tokens of smaller keys number, or weigh, less than budget."""
    low = 0
    high = last + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        measure = _measure(x_ptr, maxima_ptr, largest, temperature, vocab, middle, budget, COUNT, BLOCK_V)
        low = tl.where(measure < budget, middle, low)
        high = tl.where(measure < budget, high, middle)
    return low


@kernel
def edge_kernel(
    edges_ptr,  # [num_rows, 4]: the largest value, the temperature, how far below it tokens stay, log of their mass
    x_ptr,  # [num_rows, vocab]
    maxima_ptr,  # [num_rows, num_blocks]
    seq_idx_ptr,  # [num_rows]
    temperature_ptr,  # [num_seqs]
    top_k_ptr,  # [num_seqs]
    top_p_ptr,  # [num_seqs]
    min_p_ptr,  # [num_seqs]
    vocab,
    greedy_below,
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    num_blocks = tl.cdiv(vocab, BLOCK_V)
    edges_ptr += row * 4
    x_ptr += row * vocab
    maxima_ptr += row * num_blocks
    seq = tl.load(seq_idx_ptr + row).to(tl.int64)
    offs_b = tl.arange(0, BLOCK_B)
    largest = tl.max(tl.load(maxima_ptr + offs_b, mask=offs_b < num_blocks, other=float("-inf")), axis=0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    temperature = tl.load(temperature_ptr + seq)
    tl.store(edges_ptr, largest)
    tl.store(edges_ptr + 1, temperature)
    if temperature >= greedy_below:
        top_k = tl.load(top_k_ptr + seq)
        top_p = tl.load(top_p_ptr + seq)
        min_p = tl.load(min_p_ptr + seq)
        last = tl.full([], 0x7F7FFFFF, tl.int32)  # all but the banned
        if min_p > 0:
            last = (0.0 - tl.log(min_p)).to(tl.int32, bitcast=True)
        if (top_k > 0) & (top_k < vocab):
            last = _last_key(x_ptr, maxima_ptr, largest, temperature, vocab, top_k, last, True, BLOCK_V)
        everything = float("inf")
        if top_p < 1:
            mass = _measure(x_ptr, maxima_ptr, largest, temperature, vocab, last + 1, everything, False, BLOCK_V)
            last = tl.minimum(last, 0x42D00000)  # what is 104 below weighs nothing
            last = _last_key(x_ptr, maxima_ptr, largest, temperature, vocab, top_p * mass, last, False, BLOCK_V)
        mass = _measure(x_ptr, maxima_ptr, largest, temperature, vocab, last + 1, everything, False, BLOCK_V)
        tl.store(edges_ptr + 2, last.to(tl.float32, bitcast=True))
        tl.store(edges_ptr + 3, tl.log(tl.maximum(mass, 1.0)))


@kernel
def filter_kernel(
    x_ptr,  # [num_rows, vocab], in place
    edges_ptr,  # [num_rows, 4]
    vocab,
    greedy_below,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    x_ptr += row * vocab
    edges_ptr += row * 4
    largest = tl.load(edges_ptr)
    temperature = tl.load(edges_ptr + 1)
    if temperature < greedy_below:
        x = tl.load(x_ptr + offs_v, mask=offs_v < vocab, other=float("-inf"))
        tl.store(x_ptr + offs_v, x - largest, mask=offs_v < vocab)
    else:
        below = _below_largest(x_ptr, offs_v, largest, temperature, vocab)
        kept = below <= tl.load(edges_ptr + 2)
        log_mass = tl.load(edges_ptr + 3)
        tl.store(x_ptr + offs_v, tl.where(kept, -below - log_mass, float("-inf")), mask=offs_v < vocab)
