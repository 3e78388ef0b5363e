"""The kernels of accept_rejection: one program follows a request's path over scratch of the vocabulary's size, another
draws the token after its end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernel import kernel
from .philox import exponential_block, uniform
from .sample import best_of


@triton.jit
def _largest(maxima):
    """Of log-probabilities, 0 if nothing is left."""
    largest = tl.max(maxima, axis=0)
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _enter_node(weights_ptr, left_ptr, target_ptr, draft_ptr, vocab, BLOCK_V: tl.constexpr):
    """Fill the scratch with a node's unnormalised target and its draft log-probabilities; their normalisers."""
    target_maxima = tl.full([BLOCK_V], float("-inf"), tl.float32)
    draft_maxima = tl.full([BLOCK_V], float("-inf"), tl.float32)
    for first in range(0, vocab, BLOCK_V):
        offs_v = first + tl.arange(0, BLOCK_V)
        mask_v = offs_v < vocab
        target = tl.load(target_ptr + offs_v, mask=mask_v, other=float("-inf")).to(tl.float32)
        draft = tl.load(draft_ptr + offs_v, mask=mask_v, other=float("-inf")).to(tl.float32)
        target_maxima = tl.maximum(target_maxima, target)
        draft_maxima = tl.maximum(draft_maxima, draft)
    target_max = _largest(target_maxima)
    draft_max = _largest(draft_maxima)
    target_sums = tl.zeros([BLOCK_V], tl.float32)
    draft_sums = tl.zeros([BLOCK_V], tl.float32)
    for first in range(0, vocab, BLOCK_V):
        offs_v = first + tl.arange(0, BLOCK_V)
        mask_v = offs_v < vocab
        target = tl.load(target_ptr + offs_v, mask=mask_v, other=float("-inf")).to(tl.float32)
        left = tl.load(draft_ptr + offs_v, mask=mask_v, other=float("-inf")).to(tl.float32)
        weights = tl.exp(target - target_max)
        target_sums += weights
        draft_sums += tl.exp(left - draft_max)
        tl.store(weights_ptr + offs_v, weights, mask=mask_v)
        tl.store(left_ptr + offs_v, left, mask=mask_v)
    tl.debug_barrier()
    return tl.maximum(tl.sum(target_sums, axis=0), 1.0), draft_max, tl.maximum(tl.sum(draft_sums, axis=0), 1.0)


@triton.jit
def _reject(weights_ptr, left_ptr, token, target_sum, draft_max, draft_sum, vocab, BLOCK_V: tl.constexpr):
    """weights <- max(target - draft, 0), take token out of the draft; the new normalisers."""
    sums = tl.zeros([BLOCK_V], tl.float32)
    maxima = tl.full([BLOCK_V], float("-inf"), tl.float32)
    for first in range(0, vocab, BLOCK_V):
        offs_v = first + tl.arange(0, BLOCK_V)
        mask_v = offs_v < vocab
        target = tl.load(weights_ptr + offs_v, mask=mask_v, other=0.0) / target_sum
        left = tl.load(left_ptr + offs_v, mask=mask_v, other=float("-inf"))
        residual = tl.maximum(target - tl.exp(left - draft_max) / draft_sum, 0.0)
        left = tl.where(offs_v == token, float("-inf"), left)
        sums += residual
        maxima = tl.maximum(maxima, left)
        tl.store(weights_ptr + offs_v, residual, mask=mask_v)
        tl.store(left_ptr + offs_v, left, mask=mask_v)
    tl.debug_barrier()
    new_max = _largest(maxima)
    left_sums = tl.zeros([BLOCK_V], tl.float32)
    for first in range(0, vocab, BLOCK_V):
        offs_v = first + tl.arange(0, BLOCK_V)
        left_sums += tl.exp(tl.load(left_ptr + offs_v, mask=offs_v < vocab, other=float("-inf")) - new_max)
    return tl.sum(sums, axis=0), new_max, tl.maximum(tl.sum(left_sums, axis=0), 1.0)


@kernel
def accepted_path_kernel(
    paths_ptr,  # [num_seqs, max_path]
    path_lens_ptr,  # [num_seqs]
    weights_ptr,  # [num_seqs, vocab]
    left_ptr,  # [num_seqs, vocab]
    cu_nodes_ptr,  # [num_seqs + 1]
    tokens_ptr,  # [num_nodes]
    parents_ptr,  # [num_nodes]
    target_ptr,  # [num_nodes, vocab]
    draft_ptr,  # [num_nodes, vocab]
    seeds_ptr,  # [num_seqs]
    root_positions_ptr,  # [num_seqs]
    sample_idx_ptr,  # [num_seqs]
    vocab,
    max_path,
    accept_stream,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    first = tl.load(cu_nodes_ptr + seq).to(tl.int64)
    num_nodes = (tl.load(cu_nodes_ptr + seq + 1) - first).to(tl.int32)
    weights_ptr += seq * vocab
    left_ptr += seq * vocab
    target_ptr += first * vocab
    draft_ptr += first * vocab
    seed = tl.load(seeds_ptr + seq)
    position = tl.load(root_positions_ptr + seq)
    lane = tl.load(sample_idx_ptr + seq) << 15
    offs_p = tl.arange(0, BLOCK_P)
    path = tl.full([BLOCK_P], -1, tl.int32)
    node = 0
    length = 0
    target_sum, draft_max, draft_sum = 1.0, 0.0, 1.0
    for child in range(tl.maximum(num_nodes, 1)):
        token = tl.load(tokens_ptr + first + child)
        parent = tl.load(parents_ptr + first + child)
        enters = child == 0  # the root
        if (child > 0) & (parent == node) & (token >= 0) & (length < max_path):
            target = tl.load(weights_ptr + token) / target_sum
            draft = tl.exp(tl.load(left_ptr + token) - draft_max) / draft_sum
            bits, _, _, _ = tl.philox(seed, 0, position, child, lane | accept_stream)
            enters = uniform(bits) * draft < target
            tl.debug_barrier()  # every thread has read the scratch before any writes it
            if not enters:
                target_sum, draft_max, draft_sum = _reject(
                    weights_ptr, left_ptr, token, target_sum, draft_max, draft_sum, vocab, BLOCK_V
                )
                enters = not (target_sum > 0)
        if enters:
            path = tl.where(offs_p == length, child, path)
            node = child
            length += 1
            offset = tl.cast(child, tl.int64) * vocab
            target_sum, draft_max, draft_sum = _enter_node(
                weights_ptr, left_ptr, target_ptr + offset, draft_ptr + offset, vocab, BLOCK_V
            )
    tl.store(paths_ptr + seq * max_path + offs_p, path, mask=offs_p < max_path)
    tl.store(path_lens_ptr + seq, length)


@kernel
def recover_kernel(
    next_tokens_ptr,  # [num_seqs]
    paths_ptr,  # [num_seqs, max_path]
    path_lens_ptr,  # [num_seqs]
    weights_ptr,  # [num_seqs, vocab]
    cu_nodes_ptr,  # [num_seqs + 1]
    target_ptr,  # [num_nodes, vocab]
    seeds_ptr,  # [num_seqs]
    root_positions_ptr,  # [num_seqs]
    sample_idx_ptr,  # [num_seqs]
    vocab,
    max_path,
    recover_stream,
    LOSSLESS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A token drawn by weight, or in proportion to the last node's target if not lossless."""
    seq = tl.program_id(0).to(tl.int64)
    node = tl.load(paths_ptr + seq * max_path + tl.load(path_lens_ptr + seq) - 1)
    log_probs_ptr = target_ptr + (tl.load(cu_nodes_ptr + seq).to(tl.int64) + node) * vocab
    seed = tl.load(seeds_ptr + seq)
    position = tl.load(root_positions_ptr + seq)
    lane = tl.load(sample_idx_ptr + seq) << 15 | recover_stream
    best = float("-inf")
    token = -1
    for first in range(0, vocab, BLOCK_V):
        offs_v = first + tl.arange(0, BLOCK_V)
        mask_v = offs_v < vocab
        if LOSSLESS:
            weights = tl.load(weights_ptr + seq * vocab + offs_v, mask=mask_v, other=0.0)
            scores = tl.where(weights > 0, tl.log(tl.where(weights > 0, weights, 1.0)), float("-inf"))
        else:
            scores = tl.load(log_probs_ptr + offs_v, mask=mask_v, other=float("-inf")).to(tl.float32)
        scores -= tl.log(exponential_block(seed, first, position, node, lane, BLOCK_V))
        best_here, token_here = best_of(scores, offs_v)
        token = tl.where(best_here > best, token_here, token)
        best = tl.maximum(best, best_here)
    tl.store(next_tokens_ptr + seq, token)
