"""Unseen kernels over sequences: scans, sorts, recurrences and reductions with combines of their own."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from tests.backends.cpu.cases import FLOATS, Case, Check
from tests.backends.cpu.memory import guard


@triton.jit
def _segmented_add(left_sum, left_start, right_sum, right_start):
    return tl.where(right_start != 0, right_sum, left_sum + right_sum), left_start | right_start


@triton.jit
def segmented_cumsum_kernel(x_ptr, start_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """One program carries the running sum from block to block."""
    carry = 0.0
    for first in range(0, n, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n, other=0.0)
        start = tl.load(start_ptr + at, mask=at < n, other=0)
        sums, started = tl.associative_scan((x, start), 0, _segmented_add)
        sums = tl.where(started != 0, sums, sums + carry)
        tl.store(out_ptr + at, sums, mask=at < n)
        carry = tl.sum(tl.where(tl.arange(0, BLOCK) == BLOCK - 1, sums, 0.0))


def segmented_cumsum(dtype: torch.dtype) -> Iterator[Check]:
    n = 75
    x, start = guard(torch.randint(-9, 9, (n,)).to(dtype), (torch.rand(n) < 0.2).int())
    (out,) = guard(torch.zeros(n, dtype=dtype))
    segmented_cumsum_kernel[(1,)](x, start, out, n, BLOCK=16)
    total, want = 0.0, []
    for value, begins in zip(x.tolist(), start.tolist(), strict=True):
        total = value if begins else total + value
        want.append(total)
    yield Check("sums restart", out, torch.tensor(want, dtype=dtype), 0.0)


@triton.jit
def _later_of_equal(value_a, index_a, value_b, index_b):
    take_b = (value_b > value_a) | ((value_b == value_a) & (index_b > index_a))
    return tl.where(take_b, value_b, value_a), tl.where(take_b, index_b, index_a)


@triton.jit
def argmax_ties_kernel(x_ptr, first_ptr, last_ptr, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    mask = (row[:, None] < rows) & (column[None, :] < columns)
    x = tl.load(x_ptr + row[:, None] * columns + column[None, :], mask=mask, other=-float("inf"))
    tl.store(first_ptr + row, tl.argmax(x, axis=1), mask=row < rows)
    index = tl.broadcast_to(column[None, :], (BLOCK_M, BLOCK_N))
    _, last = tl.reduce((x, index), 1, _later_of_equal)
    tl.store(last_ptr + row, last, mask=row < rows)


def argmax_ties(dtype: torch.dtype) -> Iterator[Check]:
    rows, columns = 11, 27
    (x,) = guard(torch.randint(0, 4, (rows, columns)).to(dtype))
    first, last = guard(torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32))
    argmax_ties_kernel[(3,)](x, first, last, rows, columns, 4, 32)
    best = x == x.max(1, keepdim=True).values
    index = torch.arange(columns)
    yield Check("first of equals", first, torch.where(best, index, columns).min(1).values.int())
    yield Check("last of equals", last, torch.where(best, index, -1).max(1).values.int())


@triton.jit
def _merge_moments(mean_a, spread_a, count_a, mean_b, spread_b, count_b):
    count = count_a + count_b
    delta = mean_b - mean_a
    weight = tl.where(count == 0.0, 0.0, count_b / tl.maximum(count, 1.0))
    return mean_a + delta * weight, spread_a + spread_b + delta * delta * count_a * weight, count


@triton.jit
def welford_kernel(x_ptr, mean_ptr, variance_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(x_ptr + row * n + at, mask=inside, other=0.0)
    count = tl.where(inside, 1.0, 0.0)
    mean, spread, total = tl.reduce((x, tl.zeros_like(x), count), 0, _merge_moments)
    tl.store(mean_ptr + row, mean)
    tl.store(variance_ptr + row, spread / total)


def welford(dtype: torch.dtype) -> Iterator[Check]:
    for n in (1, 37, 64):
        x, mean, variance = guard(torch.randn(3, n) + 1000, torch.zeros(3), torch.zeros(3))
        welford_kernel[(3,)](x, mean, variance, n, BLOCK=64)
        yield Check("mean", mean, x.mean(1))
        yield Check("variance", variance, x.double().var(1, correction=0).float(), 1e-4)


@triton.jit
def sort_rows_kernel(x_ptr, out_ptr, columns, DESCENDING: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + at, mask=at < columns, other=-128 if DESCENDING else 127)
    x = tl.sort(x, descending=DESCENDING)
    tl.store(out_ptr + row * columns + at, x, mask=at < columns)


def sort_rows(dtype: torch.dtype) -> Iterator[Check]:
    for columns, block in ((13, 16), (32, 32), (2, 2)):
        for descending in (False, True):
            (x,) = guard(torch.randint(-100, 100, (3, columns)).to(dtype))
            (out,) = guard(torch.zeros(3, columns, dtype=dtype))
            sort_rows_kernel[(3,)](x, out, columns, descending, block)
            yield Check(f"{columns} {descending}", out, x.sort(1, descending=descending).values, 0.0)


@triton.jit
def online_logsumexp_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """A while loop that carries two scalars and a pointer."""
    row = tl.program_id(0)
    at = x_ptr + row * n + tl.arange(0, BLOCK)
    left = n
    peak = -float("inf")
    total = 0.0
    while left > 0:
        x = tl.load(at, mask=tl.arange(0, BLOCK) < left, other=-float("inf")).to(tl.float32)
        new = tl.maximum(peak, tl.max(x, axis=0))
        total = total * tl.exp(peak - new) + tl.sum(tl.exp(x - new), axis=0)
        peak = new
        at += BLOCK
        left -= BLOCK
    tl.store(out_ptr + row, peak + tl.log(total))


def online_logsumexp(dtype: torch.dtype) -> Iterator[Check]:
    for n in (1, 16, 100):
        x, out = guard((torch.randn(4, n) * 10).to(dtype), torch.zeros(4))
        online_logsumexp_kernel[(4,)](x, out, n, BLOCK=16)
        yield Check(f"{n}", out, torch.logsumexp(x.float(), 1))


@triton.jit
def wkv_kernel(k_ptr, v_ptr, decay_ptr, bonus_ptr, out_ptr, steps, channels, BLOCK: tl.constexpr):
    """RWKV-like: a recurrence over time in numerator, denominator and running exponent, a tile of channels each."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = c < channels
    decay = tl.load(decay_ptr + c, mask=mask, other=0.0)
    bonus = tl.load(bonus_ptr + c, mask=mask, other=0.0)
    top = tl.zeros([BLOCK], dtype=tl.float32)
    bottom = tl.zeros([BLOCK], dtype=tl.float32)
    exponent = tl.full([BLOCK], -1e30, dtype=tl.float32)
    for t in range(steps):
        k = tl.load(k_ptr + t * channels + c, mask=mask, other=0.0)
        v = tl.load(v_ptr + t * channels + c, mask=mask, other=0.0)
        peak = tl.maximum(exponent, k + bonus)
        old, new = tl.exp(exponent - peak), tl.exp(k + bonus - peak)
        tl.store(out_ptr + t * channels + c, (old * top + new * v) / (old * bottom + new), mask=mask)
        peak = tl.maximum(exponent + decay, k)
        old, new = tl.exp(exponent + decay - peak), tl.exp(k - peak)
        top = old * top + new * v
        bottom = old * bottom + new
        exponent = peak


def wkv(dtype: torch.dtype) -> Iterator[Check]:
    steps, channels = 9, 21
    k, v, decay, bonus = guard(
        torch.randn(steps, channels), torch.randn(steps, channels), -torch.rand(channels), torch.randn(channels)
    )
    (out,) = guard(torch.zeros(steps, channels))
    wkv_kernel[(2,)](k, v, decay, bonus, out, steps, channels, BLOCK=16)
    want = torch.zeros(steps, channels, dtype=torch.float64)
    for t in range(steps):
        weights = [(k[s] + (bonus if s == t else decay * (t - 1 - s))).double().exp() for s in range(t + 1)]
        want[t] = sum(w * v[s] for s, w in enumerate(weights)) / sum(weights)
    yield Check("weighted means", out, want.float(), 1e-4)


@triton.jit
def compact_kernel(x_ptr, out_ptr, count_ptr, n, BLOCK: tl.constexpr):
    """Keeps the positive values, in order: a prefix sum says where each goes."""
    base = 0
    for first in range(0, n, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n, other=0)
        keep = (x > 0).to(tl.int32)
        where = base + tl.cumsum(keep, axis=0) - 1
        tl.store(out_ptr + where, x, mask=keep != 0)
        base += tl.sum(keep, axis=0)
    tl.store(count_ptr, base)


def compact(dtype: torch.dtype) -> Iterator[Check]:
    for n in (5, 64, 90):
        x = torch.randint(-5, 5, (n,)).to(dtype)
        kept = x[x > 0]
        x, out, count = guard(x, torch.zeros(len(kept), dtype=dtype), torch.zeros(1, dtype=torch.int32))
        compact_kernel[(1,)](x, out, count, n, BLOCK=32)
        yield Check("kept", out, kept, 0.0)
        yield Check("count", count, torch.tensor([len(kept)], dtype=torch.int32))


@triton.jit
def _compose(a, b, c, d):
    """The map x -> c (a x + b) + d."""
    return a * c, b * c + d


@triton.jit
def linear_recurrence_kernel(a_ptr, b_ptr, out_ptr, REVERSE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    _, h = tl.associative_scan((a, b), 0, _compose, reverse=REVERSE)
    tl.store(out_ptr + at, h)


def linear_recurrence(dtype: torch.dtype) -> Iterator[Check]:
    for reverse in (False, True):
        a, b, out = guard(torch.rand(16, 8), torch.randn(16, 8), torch.zeros(16, 8))
        linear_recurrence_kernel[(1,)](a, b, out, reverse, 16, 8)
        state, want = torch.zeros(8), torch.zeros(16, 8)
        for t in reversed(range(16)) if reverse else range(16):
            state = a[t] * state + b[t]
            want[t] = state
        yield Check(f"reverse={reverse}", out, want)


CASES = (
    Case(segmented_cumsum),
    Case(argmax_ties, FLOATS),
    Case(welford),
    Case(sort_rows, (torch.float32, torch.int32, torch.int8)),
    Case(online_logsumexp, FLOATS),
    Case(wkv),
    Case(compact, (torch.int32, torch.int64, torch.float32)),
    Case(linear_recurrence),
)
