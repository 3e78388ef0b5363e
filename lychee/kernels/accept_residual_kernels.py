"""`Residual` of accept_residual.py in Triton. It copies no rows: what is left at a node is computed where it is needed.

A node is tested after all siblings before it, so at that time those have been refused, and what its parent has left
follows from their tokens and three numbers for each, kept in `tested`: `reached` of the parent then, the logarithm of
what was left of the draft's mass, and the sum of the residual. Functions get a request's pointers and vocab as `tree`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .philox import exponential_block, uniform
from .sample import best_of


@triton.jit
def tree_at(first, target_ptr, draft_ptr, tested_ptr, tokens_ptr, parents_ptr, vocab):
    """Of the request whose first node it is."""
    rows = first * vocab
    return target_ptr + rows, draft_ptr + rows, tested_ptr + first * 3, tokens_ptr + first, parents_ptr + first, vocab


@triton.jit
def _left_at(tree, node, end, offs_v):
    """Log-probabilities of a node's draft, those of its children before `end` taken out; not normalised."""
    _, draft_ptr, _, tokens_ptr, parents_ptr, vocab = tree
    row = draft_ptr + tl.cast(node, tl.int64) * vocab
    left = tl.load(row + offs_v, mask=offs_v < vocab, other=float("-inf")).to(tl.float32)
    for child in range(node + 1, end):
        drawn = (offs_v == tl.load(tokens_ptr + child)) & (tl.load(parents_ptr + child) == node)
        left = tl.where(drawn, float("-inf"), left)
    return left


@triton.jit
def _log_mass_left(tree, node, end, BLOCK_V: tl.constexpr):
    """The logarithm of the sum of `_left_at`, so that a remainder below fp32's range counts; 0 if nothing is left."""
    maxima = tl.full([BLOCK_V], float("-inf"), tl.float32)
    for first in range(0, tree[5], BLOCK_V):
        maxima = tl.maximum(maxima, _left_at(tree, node, end, first + tl.arange(0, BLOCK_V)))
    largest = tl.max(maxima, axis=0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    sums = tl.zeros([BLOCK_V], tl.float32)
    for first in range(0, tree[5], BLOCK_V):
        sums += tl.exp(_left_at(tree, node, end, first + tl.arange(0, BLOCK_V)) - largest)
    mass = tl.sum(sums, axis=0)
    return largest + tl.log(tl.where(mass > 0, mass, 1.0))


@triton.jit
def _residual_at(tree, node, end, offs_v):
    """Weights of a node's tokens, and `_left_at`, after the refusal of its children before `end`."""
    target_ptr, draft_ptr, tested_ptr, tokens_ptr, parents_ptr, vocab = tree
    row = tl.cast(node, tl.int64) * vocab + offs_v
    weights = tl.exp(tl.load(target_ptr + row, mask=offs_v < vocab, other=float("-inf")).to(tl.float32))
    left = tl.load(draft_ptr + row, mask=offs_v < vocab, other=float("-inf")).to(tl.float32)
    for child in range(node + 1, end):
        token = tl.load(tokens_ptr + child)
        if (tl.load(parents_ptr + child) == node) & (token >= 0):
            numbers = tested_ptr + 3 * child
            draft = tl.exp(left - tl.load(numbers + 1))
            residual = tl.maximum(tl.load(numbers) * weights - draft, 0.0)
            total = tl.load(numbers + 2)
            weights = tl.where(total > 0, residual / total, weights)
            left = tl.where(offs_v == token, float("-inf"), left)
    return weights, left


@triton.jit
def chance_of(tree, node, child, has_refused, reached, BLOCK_V: tl.constexpr):
    """As `Residual.chance`. `has_refused`: whether the node has refused a child before this one."""
    _, _, tested_ptr, tokens_ptr, _, _ = tree
    log_mass = 0.0
    if has_refused:
        log_mass = _log_mass_left(tree, node, child, BLOCK_V)
    weight, left = _residual_at(tree, node, child, tl.load(tokens_ptr + child))
    tl.store(tested_ptr + 3 * child, reached)
    tl.store(tested_ptr + 3 * child + 1, log_mass)
    tl.debug_barrier()  # one thread has written them, all will read
    target = reached * weight
    draft = tl.exp(left - log_mass)
    return tl.where(target >= draft, tl.where(target > 0, 1.0, 0.0), target / draft)


@triton.jit
def accepts(chance, seed, position, node, lane):
    bits, _, _, _ = tl.philox(seed, 0, position, node, lane)
    return uniform(bits) < chance


@triton.jit
def refuse(tree, node, child, BLOCK_V: tl.constexpr):
    """As `Residual.refuse`; gives the node's new `reached`."""
    _, _, tested_ptr, _, _, vocab = tree
    reached = tl.load(tested_ptr + 3 * child)
    log_mass = tl.load(tested_ptr + 3 * child + 1)
    sums = tl.zeros([BLOCK_V], tl.float32)
    for first in range(0, tl.where(reached > 0, vocab, 0), BLOCK_V):
        weights, left = _residual_at(tree, node, child, first + tl.arange(0, BLOCK_V))
        sums += tl.maximum(reached * weights - tl.exp(left - log_mass), 0.0)
    total = tl.sum(sums, axis=0)
    tl.store(tested_ptr + 3 * child + 2, total)
    tl.debug_barrier()
    return tl.where(reached < 1, total / (total + (1 - reached)), reached)


@triton.jit
def best_left(tree, node, end, seed, position, lane, block, BLOCK_V: tl.constexpr):
    """The best score of a block of the vocabulary, and its token: a draw by the node's weights."""
    offs_v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    weights, _ = _residual_at(tree, node, end, offs_v)
    noise = exponential_block(seed, block * BLOCK_V, position, node, lane, BLOCK_V)
    scores = tl.where(weights > 0, tl.log(tl.where(weights > 0, weights, 1.0)) - tl.log(noise), float("-inf"))
    return best_of(scores, offs_v)
