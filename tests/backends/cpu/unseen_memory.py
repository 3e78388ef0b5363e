"""Unseen kernels that gather, scatter, count by atomics, follow pointers, or work where they read."""

import itertools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from tests.backends.cpu.cases import FLOATS, Case, Check
from tests.backends.cpu.memory import guard


@triton.jit
def histogram_kernel(x_ptr, count_ptr, weight_ptr, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Lanes of one atomic hit the same bin."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0)
    bin_ = (x.to(tl.int32) & 255) * BINS // 256
    tl.atomic_add(count_ptr + bin_, 1, mask=at < n)
    tl.atomic_add(weight_ptr + bin_, (x.to(tl.int32) & 3).to(tl.float32), mask=at < n)


def histogram(dtype: torch.dtype) -> Iterator[Check]:
    n, bins = 1000, 7
    x, count, weight = guard(
        torch.randint(0, 256, (n,)).to(torch.uint8), torch.zeros(bins, dtype=torch.int32), torch.zeros(bins)
    )
    histogram_kernel[(triton.cdiv(n, 64),)](x, count, weight, n, bins, BLOCK=64)
    which = x.long() * bins // 256
    yield Check("counts", count, torch.bincount(which, minlength=bins).int())
    yield Check("weights", weight, torch.bincount(which, (x & 3).double(), minlength=bins).float(), 0.0)


@triton.jit
def embedding_kernel(id_ptr, table_ptr, out_ptr, vocab, dim, BLOCK: tl.constexpr):
    """Ids outside the vocabulary give zero rows and touch no memory."""
    row = tl.program_id(0)
    id_ = tl.load(id_ptr + row)
    d = tl.arange(0, BLOCK)
    known = (id_ >= 0) & (id_ < vocab)
    x = tl.load(table_ptr + id_ * dim + d, mask=known & (d < dim), other=0.0)
    tl.store(out_ptr + row * dim + d, x, mask=d < dim)


@triton.jit
def embedding_backward_kernel(id_ptr, grad_ptr, table_ptr, n, dim, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK)
    id_ = tl.load(id_ptr + rows, mask=rows < n, other=0)
    mask = (rows[:, None] < n) & (d[None, :] < dim)
    grad = tl.load(grad_ptr + rows[:, None] * dim + d[None, :], mask=mask, other=0.0)
    tl.atomic_add(table_ptr + id_[:, None] * dim + d[None, :], grad, mask=mask)


def embedding(dtype: torch.dtype) -> Iterator[Check]:
    n, vocab, dim = 30, 9, 20
    ids = torch.randint(-2, vocab + 2, (n,))
    table = torch.randint(-8, 8, (vocab, dim)).to(dtype)
    ids, table, out = guard(ids, table, torch.ones(n, dim, dtype=dtype))
    embedding_kernel[(n,)](ids, table, out, vocab, dim, BLOCK=32)
    known = ((ids >= 0) & (ids < vocab))[:, None]
    yield Check("rows", out, torch.where(known, table[ids.clamp(0, vocab - 1)], 0), 0.0)


def embedding_backward(dtype: torch.dtype) -> Iterator[Check]:
    n, vocab, dim = 45, 6, 20
    ids, grad = guard(torch.randint(0, vocab, (n,)), torch.randint(-4, 4, (n, dim)).to(dtype))
    (table,) = guard(torch.zeros(vocab, dim, dtype=dtype))
    embedding_backward_kernel[(triton.cdiv(n, 8),)](ids, grad, table, n, dim, 8, 32)
    yield Check("sums", table, torch.zeros(vocab, dim).index_add(0, ids, grad.float()).to(dtype), 0.0)


@triton.jit
def linked_list_kernel(next_ptr, head_ptr, length_ptr, last_ptr):
    """Pointer chasing: a while loop whose condition is a load of the pass before."""
    node = tl.load(head_ptr + tl.program_id(0))
    length = 0
    last = node + 0  # were it the same tensor, Triton's front end would not see that the loop carries it
    while node >= 0:
        last = node
        node = tl.load(next_ptr + node)
        length += 1
    tl.store(length_ptr + tl.program_id(0), length)
    tl.store(last_ptr + tl.program_id(0), last)


def linked_list(dtype: torch.dtype) -> Iterator[Check]:
    chains = ([3, 1, 4], [], [2, 0, 5, 6])
    following = torch.full((7,), -1, dtype=torch.int32)
    for chain in chains:
        for here, there in itertools.pairwise(chain):
            following[here] = there
    head = torch.tensor([c[0] if c else -1 for c in chains], dtype=torch.int32)
    args = guard(following, head, torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32))
    linked_list_kernel[(3,)](*args)
    yield Check("lengths", args[2], torch.tensor([len(c) for c in chains], dtype=torch.int32))
    yield Check("last nodes", args[3], torch.tensor([c[-1] if c else -1 for c in chains], dtype=torch.int32))


@triton.jit
def reverse_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Reverses rows; in place (out is x) each program reads both halves before it writes either."""
    row = tl.program_id(0) * n
    at = tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(x_ptr + row + at, mask=mask)
    tl.store(out_ptr + row + n - 1 - at, x, mask=mask)


def reverse_in_place(dtype: torch.dtype) -> Iterator[Check]:
    for n in (1, 17, 32):
        (x,) = guard(torch.randint(-99, 99, (3, n)).to(dtype))
        want = x.flip(1)
        reverse_kernel[(3,)](x, x, n, BLOCK=32)
        yield Check(f"{n}", x, want, 0.0)


@triton.jit
def swap_kernel(a_ptr, b_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = tl.load(a_ptr + at, mask=at < n)
    b = tl.load(b_ptr + at, mask=at < n)
    tl.store(a_ptr + at, b, mask=at < n)
    tl.store(b_ptr + at, a, mask=at < n)


def swap_overlapping(dtype: torch.dtype) -> Iterator[Check]:
    """Two views of one tensor that overlap by all but `shift` elements."""
    n = 29
    for shift in (0, 1, 5, 16):
        (both,) = guard(torch.arange(n + shift).to(dtype))
        want = both.clone()
        a, b = want[:n].clone(), want[shift:].clone()
        want[:n] = b
        want[shift:] = a
        swap_kernel[(1,)](both[:n], both[shift:], n, BLOCK=32)
        yield Check(f"shift {shift}", both, want, 0.0)


@triton.jit
def grouped_sum_kernel(address_ptr, length_ptr, out_ptr, BLOCK: tl.constexpr):
    """A table of addresses, one tensor each, as in the grouped matmul of the tutorials."""
    group = tl.program_id(0)
    x_ptr = tl.load(address_ptr + group).to(tl.pointer_type(tl.float32))
    n = tl.load(length_ptr + group)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, n, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr + group, tl.sum(total, axis=0))


def grouped_sum(dtype: torch.dtype) -> Iterator[Check]:
    groups = guard(*(torch.randint(-9, 9, (n,)).float() for n in (5, 64, 33)))
    address = torch.tensor([g.data_ptr() for g in groups])
    args = guard(address, torch.tensor([len(g) for g in groups], dtype=torch.int32), torch.zeros(3))
    grouped_sum_kernel[(3,)](*args, BLOCK=16)
    yield Check("sums", args[2], torch.stack([g.sum() for g in groups]), 0.0)


@triton.jit
def searchsorted_kernel(edge_ptr, x_ptr, out_ptr, edges, n, BLOCK: tl.constexpr):
    """Binary search, all lanes at once: bounds carried as tiles, loads at data-dependent places."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    low = tl.zeros([BLOCK], dtype=tl.int32)
    high = tl.zeros([BLOCK], dtype=tl.int32) + edges
    while tl.max((low < high).to(tl.int32), axis=0) != 0:
        middle = (low + high) // 2
        open_ = low < high
        below = tl.load(edge_ptr + middle, mask=open_, other=0.0) < x
        low = tl.where(open_ & below, middle + 1, low)
        high = tl.where(open_ & (below == 0), middle, high)
    tl.store(out_ptr + at, low, mask=at < n)


def searchsorted(dtype: torch.dtype) -> Iterator[Check]:
    for edges, n in ((10, 40), (1, 3), (0, 5)):
        sorted_edges = torch.randn(edges).sort().values
        x = torch.cat([torch.randn(n), sorted_edges])
        sorted_edges, x, out = guard(sorted_edges, x, torch.zeros(len(x), dtype=torch.int32))
        searchsorted_kernel[(triton.cdiv(len(x), 16),)](sorted_edges, x, out, edges, len(x), BLOCK=16)
        yield Check(f"{edges} edges", out, torch.searchsorted(sorted_edges, x).int())


@triton.jit
def arg_of_lowest_kernel(x_ptr, best_ptr, old_ptr, n, BLOCK: tl.constexpr):
    """The minimum over all programs and where it is, packed into one 64-bit atomic; and what an exchange returns."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=2147483647)
    packed = (x.to(tl.int64) << 32) | at
    tl.atomic_min(best_ptr, tl.min(packed, axis=0))
    old = tl.atomic_xchg(old_ptr + at, at + 1, mask=at < n)
    tl.atomic_or(old_ptr + at, old << 16, mask=at < n)


def arg_of_lowest(dtype: torch.dtype) -> Iterator[Check]:
    n = 70
    x, best = guard(torch.randint(-50, 50, (n,), dtype=torch.int32), torch.tensor([2**62]))
    (old,) = guard(torch.arange(n, dtype=torch.int32) * 3)
    arg_of_lowest_kernel[(3,)](x, best, old, n, BLOCK=32)
    lowest = int(x.min())
    where = int((x == lowest).nonzero()[0])
    yield Check("packed", best, torch.tensor([(lowest << 32) | where]))
    index = torch.arange(n, dtype=torch.int32)
    yield Check("exchanged", old, (index + 1) | ((index * 3) << 16))


CASES = (
    Case(histogram),
    Case(embedding, (*FLOATS, torch.int32)),
    Case(embedding_backward),
    Case(linked_list),
    Case(reverse_in_place, (*FLOATS, torch.int8, torch.int64)),
    Case(swap_overlapping, (torch.float32, torch.int16, torch.uint8)),
    Case(grouped_sum),
    Case(searchsorted),
    Case(arg_of_lowest),
)
