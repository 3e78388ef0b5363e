"""Reductions, scans and histograms: right for any combine, and a sum's bits depend on its own axis alone."""

import itertools

import pytest
import torch
import triton
import triton.language as tl

from lychee.backends.cpu import activated

SIZES = [1, 2, 4, 8, 16, 32, 128, 512]


@pytest.fixture(autouse=True)
def _on_the_cpu():
    with activated():
        yield


def drawn(*shape, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(*shape).mul(10).to(dtype)


@triton.jit
def sums_kernel(out, x, row_step, step, HOW: tl.constexpr, M: tl.constexpr, K: tl.constexpr):
    """Sums over K of a tile [M, K], or of what is computed from it, or of its transpose."""
    i, k = tl.arange(0, M), tl.arange(0, K)
    if HOW == "across":
        total = tl.sum(tl.load(x + i[None, :] * row_step + k[:, None] * step), 0)
    else:
        tile = tl.load(x + i[:, None] * row_step + k[None, :] * step)
        if HOW == "computed":
            tile = tl.exp(tile * 0.1) * tile
        elif HOW == "held":
            tile = tl.dot(tile, (k[:, None] == k[None, :]).to(tl.float32), input_precision="ieee")
        elif HOW == "transposed":
            tile = tl.trans(tl.trans(tile))
        total = tl.sum(tile, 1)
    tl.store(out + i, total)


def row_sums(x, how, rows, depth, by_columns):
    """Of the first rows; the memory is that of all."""
    x = x.T.contiguous().T if by_columns else x
    out = torch.zeros(rows)
    sums_kernel[(1,)](out, x, *x.stride(), HOW=how, M=rows, K=depth)
    return out


@pytest.mark.parametrize("by_columns", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("how", ["plain", "computed", "held", "transposed", "across"])
def test_bits_of_a_sum_do_not_depend_on_other_axes(how, by_columns):
    for depth in (2, 16, 64) if how == "held" else (2, 16, 64, 512):
        x = drawn(32, depth)
        want = row_sums(x, how, 32, depth, by_columns)
        near = x.double() * torch.exp(x.double() * 0.1) if how == "computed" else x.double()
        torch.testing.assert_close(want.double(), near.sum(1), rtol=1e-4, atol=1e-3)
        for rows in (1, 2, 4, 8, 16):
            assert torch.equal(row_sums(x, how, rows, depth, by_columns), want[:rows]), (depth, rows)


@triton.jit
def masked_sum_kernel(out, x, n, K: tl.constexpr):
    o = tl.arange(0, K)
    tl.store(out, tl.sum(tl.load(x + o, mask=o < n, other=0.0), 0))
    tl.store(out + 1, tl.sum(tl.where(o < n, tl.load(x + o), 0.0), 0))


def test_bits_of_a_sum_do_not_depend_on_how_a_mask_is_written():
    x = drawn(512)
    for n in (1, 7, 64, 100, 511, 512):
        out = torch.zeros(2)
        masked_sum_kernel[(1,)](out, x, n, K=512)
        assert out[0] == out[1], n


@triton.jit
def plain_kernel(out, x, n, HOW: tl.constexpr, K: tl.constexpr):
    o = tl.arange(0, K)
    v = tl.load(x + o)
    if HOW == "sum":
        tl.store(out, tl.sum(v, 0))
    elif HOW == "max":
        tl.store(out, tl.max(v, 0))
    elif HOW == "min":
        tl.store(out, tl.min(v, 0))
    elif HOW == "argmax":
        tl.store(out, tl.argmax(v, 0))
    elif HOW == "argmin":
        tl.store(out, tl.argmin(v, 0))
    elif HOW == "xor":
        tl.store(out, tl.xor_sum(v, 0))


def reduced(how, x, dtype):
    out = torch.zeros(1, dtype=dtype)
    plain_kernel[(1,)](out, x, 0, HOW=how, K=len(x))
    return out[0]


INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, *INTEGERS], ids=str)
@pytest.mark.parametrize("how", ["max", "min", "argmax", "argmin"])
def test_extremes_are_those_of_torch(how, dtype):
    for size in SIZES:
        x = drawn(size, dtype=dtype)
        want = getattr(torch, {"max": "amax", "min": "amin"}.get(how, how))(x, 0)
        assert reduced(how, x, want.dtype) == want, size


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_sums_are_exact(dtype):
    for size in SIZES:
        torch.manual_seed(size)
        low, high = (-(2**30), 2**30) if dtype.itemsize >= 4 else (-128, 128)
        x = torch.randint(low, high, (size,)).to(dtype)
        wide = dtype if dtype.itemsize >= 4 else torch.int32
        assert reduced("sum", x, wide) == x.to(wide).sum().to(wide)
        want = 0
        for value in x.tolist():
            want ^= value
        assert reduced("xor", x, dtype) == want


@pytest.mark.parametrize("how", ["argmax", "argmin"])
def test_the_first_of_equal_extremes_wins(how):
    for size in SIZES:
        for first, second in itertools.combinations(sorted({0, 1, size // 3, size // 2, size - 1}), 2):
            if second < size:
                x = torch.zeros(size)
                x[[first, second]] = 1.0 if how == "argmax" else -1.0
                assert reduced(how, x, torch.int64) == first, (size, first, second)
        assert reduced(how, torch.full((size,), 3.0), torch.int64) == 0


def test_maxima_pass_over_nan_unless_all_are():
    x = torch.full((64,), float("nan"))
    assert reduced("max", x, torch.float32).isnan()
    x[37] = -5.0
    assert reduced("max", x, torch.float32) == -5.0
    assert reduced("min", x, torch.float32) == -5.0


@triton.jit
def _merge(mean_a, m2_a, count_a, mean_b, m2_b, count_b):
    """Welford's, of two groups."""
    count = count_a + count_b
    share = tl.where(count == 0.0, 0.0, count_b / count)
    delta = mean_b - mean_a
    return mean_a + delta * share, m2_a + m2_b + delta * delta * count_a * share, count


@triton.jit
def welford_kernel(out, x, n, M: tl.constexpr, K: tl.constexpr, AXIS: tl.constexpr):
    i, k = tl.arange(0, M)[:, None], tl.arange(0, K)[None, :]
    v = tl.load(x + i * K + k)
    counted = ((i if AXIS == 0 else k) + i * 0 + k * 0 < n).to(tl.float32)
    mean, m2, count = tl.reduce((v * counted, v * 0, counted), AXIS, _merge)
    o = tl.arange(0, K if AXIS == 0 else M)
    tl.store(out + o, mean)
    tl.store(out + o + o.shape[0], m2 / count)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_combine_over_tuples(axis):
    for rows, columns in [(1, 8), (8, 1), (4, 64), (32, 16)]:
        x = drawn(rows, columns)
        size = x.shape[axis]
        for n in {1, size, max(1, size - 3)}:
            out = torch.zeros(2, x.numel() // size)
            welford_kernel[(1,)](out, x, n, M=rows, K=columns, AXIS=axis)
            seen = x.narrow(axis, 0, n).double()
            want = torch.stack([seen.mean(axis), seen.var(axis, unbiased=False)]).float()
            torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)


@triton.jit
def _longest(a, b):
    """Of numbers, the one with more bits set below 2^16: no op of the compiler's has this combine."""
    bits_a, bits_b = a & 0xFFFF, b & 0xFFFF
    return tl.where(bits_a >= bits_b, a, b)


@triton.jit
def any_kernel(out, x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, AXIS: tl.constexpr):
    i = tl.arange(0, A)[:, None, None] * B * C + tl.arange(0, B)[None, :, None] * C + tl.arange(0, C)[None, None, :]
    v = tl.reduce(tl.load(x + i), AXIS, _longest)
    R: tl.constexpr = B if AXIS == 0 else A
    S: tl.constexpr = B if AXIS == 2 else C
    tl.store(out + tl.arange(0, R)[:, None] * S + tl.arange(0, S)[None, :], v)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_combine_nobody_has_heard_of_over_any_axis_of_three(axis):
    torch.manual_seed(0)
    for shape in [(2, 4, 8), (8, 1, 2), (1, 16, 4), (4, 4, 32)]:
        x = torch.randperm(1 << 16)[: torch.Size(shape).numel()].view(shape).int() + (5 << 16)
        want = x.amax(axis)
        out = torch.zeros_like(want)
        any_kernel[(1,)](out, x, *shape, AXIS=axis)
        assert torch.equal(out, want), shape


@triton.jit
def _affine(a, b, c, d):
    """x -> a x + b, then x -> c x + d: a scan whose order matters."""
    return a * c, b * c + d


@triton.jit
def scan_kernel(out, x, HOW: tl.constexpr, REVERSE: tl.constexpr, M: tl.constexpr, K: tl.constexpr, AXIS: tl.constexpr):
    at = tl.arange(0, M)[:, None] * K + tl.arange(0, K)[None, :]
    v = tl.load(x + at)
    if HOW == "sum":
        tl.store(out + at, tl.cumsum(v, AXIS, reverse=REVERSE))
    elif HOW == "product":
        tl.store(out + at, tl.cumprod(v, AXIS, reverse=REVERSE))
    else:
        _, b = tl.associative_scan((v * 0 + 3, v), AXIS, _affine, reverse=REVERSE)
        tl.store(out + at, b)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("how", ["sum", "product", "affine"])
def test_scans_run_along_their_axis_in_order(how, reverse, axis):
    """In int64, which wraps, every order but the right one shows."""
    for shape in [(1, 8), (8, 1), (4, 64), (16, 2)]:
        torch.manual_seed(0)
        x = torch.randint(-(2**60), 2**60, shape)
        out = torch.zeros_like(x)
        scan_kernel[(1,)](out, x, HOW=how, REVERSE=reverse, M=shape[0], K=shape[1], AXIS=axis)
        along = x.flip(axis) if reverse else x
        if how == "affine":
            lines, done = along.unbind(axis), []
            for line in lines:
                done.append(line if not done else done[-1] * 3 + line)
            want = torch.stack(done, axis)
        else:
            want = along.cumsum(axis) if how == "sum" else along.cumprod(axis)
        assert torch.equal(out, want.flip(axis) if reverse else want), shape


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_a_floating_point_scan_adds_one_after_the_other(reverse):
    x = drawn(4, 64)
    out = torch.zeros_like(x)
    scan_kernel[(1,)](out, x, HOW="sum", REVERSE=reverse, M=4, K=64, AXIS=1)
    total, steps = torch.zeros(4), []
    for column in (x.flip(1) if reverse else x).unbind(1):
        total = total + column
        steps.append(total)
    want = torch.stack(steps, 1)
    assert torch.equal(out, want.flip(1) if reverse else want)


@triton.jit
def histogram_kernel(out, x, n, BINS: tl.constexpr, K: tl.constexpr):
    o = tl.arange(0, K)
    tl.store(out + tl.arange(0, BINS), tl.histogram(tl.load(x + o), BINS, mask=o < n))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_histograms_count_what_is_inside_and_not_masked(dtype):
    torch.manual_seed(0)
    x = torch.randint(0, 16, (128,)).to(dtype)
    for n in (0, 1, 77, 128):
        out = torch.zeros(16, dtype=torch.int32)
        histogram_kernel[(1,)](out, x, n, BINS=16, K=128)
        assert torch.equal(out, x[:n].bincount(minlength=16).int()), n
