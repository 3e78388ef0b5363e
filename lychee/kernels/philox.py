"""Philox4x32-10 counter-based random numbers (Salmon et al., SC 2011), and the noise that sampling makes of them.

Key = (seed's low word, seed's high word). Counter = (token // 4, position, node, lane) and token t's bits are word
t % 4 of the output; lane = stream | draw << 3 | sample_idx << 15. Each stream names positions and nodes its own way:

    TARGET    position of the token drawn            node 0
    DRAFT     the round's root position              the node whose children are drawn
    ACCEPT    the round's root position              the child tested (token 0)
    RECOVER   the round's root position              the node where the path ended
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernel import kernel
from .op import op
from .sizes import cdiv
from .types import Cost, PhiloxBits, PhiloxCounters, RowSeeds

TARGET, DRAFT, ACCEPT, RECOVER = range(4)
WORD = 0xFFFFFFFF
Word = TypeVar("Word", int, Tensor)


def philox_words(seed: Word, c0: Word, c1: Word, c2: Word, c3: Word) -> tuple[Word, Word, Word, Word]:
    """The four output words, each in [0, 2^32), of a key and counter: ints, or broadcastable int64 tensors."""
    k0, k1 = seed & WORD, seed >> 32 & WORD
    c0, c1, c2, c3 = c0 & WORD, c1 & WORD, c2 & WORD, c3 & WORD
    for _ in range(10):
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # a tensor's wraps modulo 2^64: its sign bit is data
        c0, c1 = (high >> 32 ^ c1 ^ k0) & WORD, high & WORD
        c2, c3 = (low >> 32 ^ c3 ^ k1) & WORD, low & WORD
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85  # carries out of the word are masked off with the rest
    return c0, c1, c2, c3


def lane(stream: int, draw: int, sample_idx: Word) -> Word:
    """Counter word 3; draw < 4096, sample_idx < 131072."""
    return stream | draw << 3 | sample_idx << 15


def uniforms(bits: Tensor) -> Tensor:
    """u = min((bits + 1/2) * 2^-32, 1 - 2^-24) in fp32, so 0 < u < 1."""
    return ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def exponentials(seeds: Tensor, positions: Tensor, nodes: Tensor, lanes: Tensor, vocab: int) -> Tensor:
    """E = -log1p(-u) of every token, fp32 [num_rows, vocab]; log1p(x) = x * log(w) / (w - 1), w = 1 + x (Kahan)."""
    groups = torch.arange(-(-vocab // 4), device=seeds.device)
    words = philox_words(seeds[:, None], groups, positions[:, None], nodes[:, None], lanes[:, None])
    u = uniforms(torch.stack(words, -1).flatten(1)[:, :vocab])
    w = 1 - u
    return torch.where(w == 1, u, u * (-w.log() / (1 - w)))


def philox_reference(seeds: RowSeeds, counters: PhiloxCounters) -> PhiloxBits:
    bits = torch.stack(philox_words(seeds, *counters.long().unbind(-1)), -1)
    return torch.where(bits > WORD >> 1, bits - (WORD + 1), bits).int()


def philox_sample(dtype: torch.dtype, device: str, *, num_rows: int) -> dict[str, Any]:
    counters = torch.randint(-(2**31), 2**31, (num_rows, 4), dtype=torch.int32, device=device)
    return {"seeds": torch.randint(-(2**63), 2**63 - 1, (num_rows,), device=device), "counters": counters}


def philox_cost(seeds: Tensor, counters: Tensor) -> Cost:
    return Cost(flops=0, bytes=8 * seeds.numel() + 8 * counters.numel())


@triton.jit
def uniform(bits):
    """As `uniforms`; the factor is 2^-32, the limit 1 - 2^-24."""
    return tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)


@triton.jit
def exponential_block(seed, first, position, node, lane, BLOCK_V: tl.constexpr):
    """As `exponentials`, of tokens first .. first + BLOCK_V of one row; first is a multiple of 4."""
    groups = first // 4 + tl.arange(0, BLOCK_V // 4)
    r0, r1, r2, r3 = tl.philox(seed, groups, position + groups * 0, node + groups * 0, lane + groups * 0)
    u = uniform(tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3)))
    w = 1.0 - u
    exact = w == 1.0
    return tl.where(exact, u, u * (-tl.log(w) / tl.where(exact, 1.0, 1.0 - w)))


@kernel
def _philox_kernel(
    bits_ptr,  # [num_rows, 4]
    seeds_ptr,  # [num_rows]
    counters_ptr,  # [num_rows, 4]
    num_rows,
    BLOCK_R: tl.constexpr,
):
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_r = offs_r < num_rows
    seeds = tl.load(seeds_ptr + offs_r, mask=mask_r, other=0)
    counter = counters_ptr + offs_r * 4
    c0 = tl.load(counter, mask=mask_r, other=0)
    c1 = tl.load(counter + 1, mask=mask_r, other=0)
    c2 = tl.load(counter + 2, mask=mask_r, other=0)
    c3 = tl.load(counter + 3, mask=mask_r, other=0)
    r0, r1, r2, r3 = tl.philox(seeds, c0, c1, c2, c3)
    bits = bits_ptr + offs_r * 4
    tl.store(bits, r0.to(tl.int32, bitcast=True), mask=mask_r)
    tl.store(bits + 1, r1.to(tl.int32, bitcast=True), mask=mask_r)
    tl.store(bits + 2, r2.to(tl.int32, bitcast=True), mask=mask_r)
    tl.store(bits + 3, r3.to(tl.int32, bitcast=True), mask=mask_r)


@op(reference=philox_reference, sample=philox_sample, cost=philox_cost, typical={"num_rows": 65536})
def philox(bits: Tensor, seeds: Tensor, counters: Tensor) -> None:
    """Philox4x32-10 words of each row's seed and counter, as int32 bits."""
    num_rows = seeds.shape[0]
    _philox_kernel[(cdiv(num_rows, 256),)](bits, seeds, counters, num_rows, BLOCK_R=256)
