"""Drawing tokens: the Gumbel top-m trick (arXiv:1903.06059) over counter-based noise."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernel import kernel
from .op import op
from .philox import TARGET, exponential_block, exponentials, lane
from .sizes import cdiv, next_power_of_2
from .types import NEVER, Cost, Draws, LogProbs, NoiseKeys

BLOCK_V = 1024  # tokens of one program


def draw_reference(log_probs: LogProbs, keys: NoiseKeys, num_samples: int, stream: int, replacement: bool) -> Draws:
    noisy = (~keys.greedy).nonzero()[:, 0]
    scores = _scores(log_probs, keys, noisy, stream, 0)
    draws = torch.empty(len(log_probs), num_samples, dtype=torch.int32, device=log_probs.device)
    for sample in range(num_samples):
        if replacement and sample:
            scores = _scores(log_probs, keys, noisy, stream, sample)
        token = scores.argmax(-1, keepdim=True)  # the first of equal maxima: the lowest id
        draws[:, sample : sample + 1] = torch.where(scores.gather(1, token) > NEVER, token, -1)
        if not replacement and sample + 1 < num_samples:
            scores = scores.scatter(1, token, NEVER)
    return draws


def _scores(log_probs: Tensor, keys: NoiseKeys, noisy: Tensor, stream: int, draw: int) -> Tensor:
    """log prob - log E for the noisy rows, log prob for the greedy ones."""
    if not len(noisy):
        return log_probs
    seeds, positions, nodes, samples = (
        t[noisy].long() for t in (keys.seeds, keys.positions, keys.nodes, keys.sample_idx)
    )
    noise = exponentials(seeds, positions, nodes, lane(stream, draw, samples), log_probs.shape[1])
    scores = log_probs.clone()
    scores[noisy] -= noise.log()
    return scores


def draw_sample(
    dtype: torch.dtype, device: str, *, num_rows: int, vocab: int, num_samples: int, replacement: bool
) -> dict[str, Any]:
    log_probs = torch.randn(num_rows, vocab).log_softmax(-1)
    log_probs[torch.rand(num_rows, vocab) < 0.3] = NEVER
    log_probs[torch.rand(num_rows) < 0.2, 1:] = NEVER  # fewer tokens than draws
    greedy = torch.rand(num_rows) < 0.3
    log_probs[greedy] = (log_probs[greedy] * 2).round() / 2  # exact ties
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,))
    integers = [torch.randint(0, high, (num_rows,), dtype=torch.int32) for high in (2**31 - 1, 64, 8)]
    keys = NoiseKeys(*(t.to(device) for t in (seeds, *integers, greedy)))
    return {
        "log_probs": log_probs.to(device),
        "keys": keys,
        "num_samples": num_samples,
        "stream": TARGET,
        "replacement": bool(replacement),
    }


def draw_cost(log_probs: Tensor, keys: NoiseKeys, num_samples: int, stream: int, replacement: bool) -> Cost:
    num_rows, vocab = log_probs.shape
    return Cost(flops=40 * num_rows * vocab, bytes=4 * num_rows * (vocab + num_samples))


@triton.jit
def best_of(scores, ids):
    """The highest score and the lowest id that has it; id -1 if all are -inf."""
    best = tl.max(scores, axis=0)
    token = tl.min(tl.where(scores == best, ids, 0x7FFFFFFF), axis=0)
    return best, tl.where(best > float("-inf"), token, -1)


@kernel
def _draw_blocks_kernel(
    best_scores_ptr,  # [num_rows, num_samples, num_blocks]
    best_ids_ptr,  # [num_rows, num_samples, num_blocks]
    log_probs_ptr,  # [num_rows, vocab]
    seeds_ptr,  # [num_rows]
    positions_ptr,  # [num_rows]
    nodes_ptr,  # [num_rows]
    sample_idx_ptr,  # [num_rows]
    greedy_ptr,  # [num_rows]
    vocab,
    num_samples,
    stream,
    REPLACEMENT: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    num_blocks = tl.num_programs(1)
    offs_v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    log_probs = tl.load(log_probs_ptr + row * vocab + offs_v, mask=offs_v < vocab, other=float("-inf"))
    seed = tl.load(seeds_ptr + row)
    position = tl.load(positions_ptr + row)
    node = tl.load(nodes_ptr + row)
    first_lane = stream | tl.load(sample_idx_ptr + row) << 15
    noisy = tl.load(greedy_ptr + row) == 0
    scores = log_probs
    for sample in range(num_samples):
        if noisy & (REPLACEMENT | (sample == 0)):
            lane = first_lane | sample << 3
            scores = log_probs - tl.log(exponential_block(seed, block * BLOCK_V, position, node, lane, BLOCK_V))
        best, token = best_of(scores, offs_v)
        here = (row * num_samples + sample) * num_blocks + block
        tl.store(best_scores_ptr + here, best)
        tl.store(best_ids_ptr + here, token)
        if not REPLACEMENT:
            scores = tl.where(offs_v == token, float("-inf"), scores)


@kernel
def draw_merge_kernel(
    draws_ptr,  # [num_rows, num_samples]
    best_scores_ptr,  # [num_rows, num_samples, num_blocks]
    best_ids_ptr,  # [num_rows, num_samples, num_blocks]
    num_samples,
    num_blocks,
    REPLACEMENT: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    num_candidates = num_samples * num_blocks
    candidates = row * num_candidates + offs_c
    scores = tl.load(best_scores_ptr + candidates, mask=offs_c < num_candidates, other=float("-inf"))
    ids = tl.load(best_ids_ptr + candidates, mask=offs_c < num_candidates, other=-1)
    for sample in range(num_samples):
        eligible = scores
        if REPLACEMENT:
            eligible = tl.where(offs_c // num_blocks == sample, scores, float("-inf"))
        _, token = best_of(eligible, ids)
        tl.store(draws_ptr + row * num_samples + sample, token)
        if not REPLACEMENT:
            scores = tl.where(ids == token, float("-inf"), scores)


def draw_scratch(
    log_probs: Tensor, keys: NoiseKeys, num_samples: int, stream: int, replacement: bool
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    num_rows, vocab = log_probs.shape
    shape = num_rows, num_samples, cdiv(vocab, BLOCK_V)
    return {"best_scores": (shape, torch.float32), "best_ids": (shape, torch.int32)}


@op(
    reference=draw_reference,
    sample=draw_sample,
    cost=draw_cost,
    typical={"num_rows": 16, "vocab": 32000, "num_samples": 4, "replacement": 0},
    scratch=draw_scratch,
)
def draw(
    draws: Tensor,
    best_scores: Tensor,
    best_ids: Tensor,
    log_probs: Tensor,
    keys: NoiseKeys,
    num_samples: int,
    stream: int,
    replacement: bool,
) -> None:
    """The tokens of the num_samples highest scores log prob - log E, in order; greedy rows: log prob alone.

    That is sampling without replacement in draw order. With replacement every sample is the first of its own noise.
    The lowest id wins an exact tie. Only tokens above -inf are drawn; -1 where they ran out. `stream` is one of
    philox.py's. Every program finds the best of one block of the vocabulary, then one program per row merges them.
    """
    num_rows, _, num_blocks = best_ids.shape
    vocab = log_probs.shape[1]
    _draw_blocks_kernel[(num_rows, num_blocks)](
        best_scores,
        best_ids,
        log_probs,
        keys.seeds,
        keys.positions,
        keys.nodes,
        keys.sample_idx,
        keys.greedy,
        vocab,
        num_samples,
        stream,
        REPLACEMENT=bool(replacement),
        BLOCK_V=BLOCK_V,
    )
    draw_merge_kernel[(num_rows,)](
        draws,
        best_scores,
        best_ids,
        num_samples,
        num_blocks,
        REPLACEMENT=bool(replacement),
        BLOCK_C=next_power_of_2(num_samples * num_blocks),
    )
