"""Behind a false mask nothing is read or written; `other` stands there. Memory ends at dead pages where masks end."""

import itertools

import pytest
import torch
import triton
import triton.language as tl

from lychee.backends.cpu import activated, nests
from tests.backends.cpu.memory import PAGE, guarded
from tests.backends.cpu.stages import func_of, run

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]
N = 64
SIZES = [0, 1, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64]


def values(count, dtype):
    return torch.arange(1, count + 1).remainder(97).to(dtype)


@pytest.fixture(autouse=True)
def _on_the_cpu():
    with activated():
        yield


@triton.jit
def mask_of(o, a, b, KIND: tl.constexpr):
    if KIND == "o < a":
        return o < a
    elif KIND == "o <= a - 1":  # noqa: RET505
        return o <= a - 1
    elif KIND == "a > o":
        return a > o
    elif KIND == "a - 1 >= o":
        return a - 1 >= o
    elif KIND == "3 * o < 3 * a":
        return 3 * o < 3 * a
    elif KIND == "long o < long a":
        return o.to(tl.int64) < a.to(tl.int64)
    elif KIND == "o < a and o < b":
        return (o < a) & (o < b)
    elif KIND == "o >= a":
        return o >= a
    elif KIND == "not o < a":
        return (o < a) == 0
    elif KIND == "63 - o < a":
        return 63 - o < a
    elif KIND == "o != a":
        return o != a
    elif KIND == "o < a or o >= b":
        return (o < a) | (o >= b)
    elif KIND == "o odd and o < a":
        return (o % 2 == 1) & (o < a)
    elif KIND == "a <= o < b":
        return (a <= o) & (o < b)
    else:
        tl.static_assert(KIND == "a < b")
        return (o >= 0) & (a < b)


PREFIXES = {
    "o < a": lambda o, a, b: o < a,
    "o <= a - 1": lambda o, a, b: o < a,
    "a > o": lambda o, a, b: o < a,
    "a - 1 >= o": lambda o, a, b: o < a,
    "3 * o < 3 * a": lambda o, a, b: o < a,
    "long o < long a": lambda o, a, b: o < a,
    "o < a and o < b": lambda o, a, b: (o < a) & (o < b),
}
OTHERS = {
    "o >= a": lambda o, a, b: o >= a,
    "not o < a": lambda o, a, b: o >= a,
    "63 - o < a": lambda o, a, b: 63 - o < a,
    "o != a": lambda o, a, b: o != a,
    "o < a or o >= b": lambda o, a, b: (o < a) | (o >= b),
    "o odd and o < a": lambda o, a, b: (o % 2 == 1) & (o < a),
    "a <= o < b": lambda o, a, b: (a <= o) & (o < b),
    "a < b": lambda o, a, b: (o >= 0) & torch.tensor(a < b),
}


@triton.jit
def copy_kernel(loaded, stored, x, a, b, KIND: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, N)
    m = mask_of(o, a, b, KIND)
    tl.store(loaded + o, tl.load(x + o, mask=m, other=5))
    tl.store(stored + o, tl.load(x + o), mask=m)


def bounds():
    return itertools.product((0, 3, 16, 40, 64, 100), (2, 30, 64))


def check_copy(kind, mask):
    x, o = values(N, torch.float32), torch.arange(N)
    for a, b in bounds():
        loaded, stored = torch.zeros(2, N)
        func = func_of(copy_kernel, loaded, stored, x, a, b, KIND=kind, N=N)
        arguments = [v for v in (a, b) if any(arg.type.elem == "i32" for arg in func.args)]
        run(func, loaded, stored, x, *arguments)
        m = mask(o, a, b)
        assert torch.equal(loaded, torch.where(m, x, 5.0)), (kind, a, b)
        assert torch.equal(stored, torch.where(m, x, 0.0)), (kind, a, b)


@pytest.mark.parametrize("kind", PREFIXES | OTHERS)
def test_masked_lanes_are_not_written_and_read_as_other(kind):
    check_copy(kind, (PREFIXES | OTHERS)[kind])


@pytest.mark.parametrize("kind", ["o >= a", "63 - o < a", "a <= o < b"])
def test_a_mask_that_is_no_prefix_is_not_taken_for_one(kind, monkeypatch):
    """Without the proof these masks come out wrong: the test above tests something."""
    monkeypatch.setattr(nests, "growth", lambda f, term, axis: 1 if axis in term.axes else 0)
    with pytest.raises(AssertionError):
        check_copy(kind, OTHERS[kind])


@triton.jit
def tail_kernel(y, x, n, BLOCK: tl.constexpr):
    """y = x + 1 in blocks, the last one masked."""
    for start in range(0, n, BLOCK):
        o = start + tl.arange(0, BLOCK)
        tl.store(y + o, tl.load(x + o, mask=o < n, other=0) + 1, mask=o < n)


@pytest.mark.parametrize("at_start", [False, True], ids=["end", "start"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_ends_where_a_prefix_does(dtype, at_start):
    for n in [*SIZES, 65, 100, 127, 129]:
        x = guarded(values(n, dtype), at_start=at_start)
        y = guarded(torch.zeros(n, dtype=dtype), at_start=at_start)
        tail_kernel[(1,)](y.tensor, x.tensor, n, BLOCK=N)
        assert torch.equal(y.tensor, x.tensor + 1), n
        assert y.intact(), n


@triton.jit
def shifted_kernel(y, x, a, b, KIND: tl.constexpr, N: tl.constexpr):
    """x and y hold the elements from a on."""
    o = tl.arange(0, N)
    m = mask_of(o, a, b, KIND)
    tl.store(y + o - a, tl.load(x + o - a, mask=m), mask=m)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_begins_where_a_suffix_does(dtype):
    for n in SIZES[1:]:
        x = guarded(values(n, dtype), at_start=True)
        y = guarded(torch.zeros(n, dtype=dtype), at_start=True)
        shifted_kernel[(1,)](y.tensor, x.tensor, N - n, 0, KIND="o >= a", N=N)
        assert torch.equal(y.tensor, x.tensor), n
        assert y.intact(), n


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_is_no_more_than_the_band_that_a_mask_leaves(dtype):
    n = PAGE // dtype.itemsize
    x, y = guarded(values(n, dtype)), guarded(torch.zeros(n, dtype=dtype))
    for a in (1, 5, n):
        y.tensor.zero_()
        shifted_kernel[(1,)](y.tensor, x.tensor, a, a + n, KIND="a <= o < b", N=2 * n)
        assert torch.equal(y.tensor, x.tensor), a


@triton.jit
def chosen_kernel(y, x, index, flags, N: tl.constexpr):
    """Where the flag is off the index is wild."""
    o = tl.arange(0, N)
    on = tl.load(flags + o) != 0
    at = tl.load(index + o)
    tl.store(y + at, tl.load(x + at, mask=on, other=0) + 1, mask=on)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mask_read_from_memory_guards_wild_addresses(dtype):
    torch.manual_seed(0)
    for share in (0.0, 0.1, 0.5, 1.0):
        flags = (torch.rand(N) < share).int()
        index = torch.randperm(N).where(flags > 0, 1 << 40)
        x, y = guarded(values(N, dtype)), guarded(torch.zeros(N, dtype=dtype))
        chosen_kernel[(1,)](y.tensor, x.tensor, index, flags, N=N)
        at = index[flags > 0]
        assert torch.equal(y.tensor[at], x.tensor[at] + 1)
        assert int((y.tensor != 0).sum()) == len(at)


@triton.jit
def nowhere_kernel(y, x, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    m = o < n
    scalar = tl.load(x, mask=n > 0, other=3)
    tile = tl.load(x + o, mask=m, other=4)
    square = tl.load(x + o[:, None] + o[None, :], mask=m[:, None] & (o >= 0)[None, :], other=5)
    product = tl.dot(square, square, input_precision="ieee")
    tl.store(x + o, tile, mask=m)
    tl.store(x, scalar, mask=n > 0)
    tl.atomic_add(x + o, tile, mask=m)
    tl.store(y + o, tile + scalar + tl.sum(product, 1))


def test_a_mask_that_fails_everywhere_touches_nothing():
    y = torch.zeros(16)
    nothing = torch.zeros(0)
    assert nothing.data_ptr() == 0
    nowhere_kernel[(1,)](y, nothing, 0, BLOCK=16)
    assert y.tolist() == [7.0 + 16 * 16 * 25] * 16


@triton.jit
def other_kernel(y, x, others, n, KIND: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, N)
    if KIND == "none":
        v = tl.where(o < n, tl.load(x + o, mask=o < n), 0)
    elif KIND == "number":
        v = tl.load(x + o, mask=o < n, other=-3)
    elif KIND == "tile":
        v = tl.load(x + o, mask=o < n, other=tl.load(others + o))
    else:  # one address for all lanes
        v = tl.load(x + o * 0, mask=o < n, other=tl.load(others + o))
    tl.store(y + o, v)


@pytest.mark.parametrize("kind", ["none", "number", "tile", "uniform"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
def test_other_stands_where_the_mask_fails(dtype, kind):
    others = values(N, torch.int32).add(40).remainder(7).to(dtype)
    for n in SIZES[1:]:
        x = guarded(values(n, dtype)).tensor
        y = torch.zeros(N, dtype=dtype)
        other_kernel[(1,)](y, x, others, n, KIND=kind, N=N)
        fill = {"none": torch.zeros_like(y), "number": torch.full((N,), -3).to(dtype)}.get(kind, others)
        front = x[:1].expand(n) if kind == "uniform" else x
        assert torch.equal(y, torch.cat([front, fill[n:]])), n


@triton.jit
def first_kernel(y, x, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(y + o, tl.load(x + o, mask=o < 1).to(y.dtype.element_ty), mask=o < 1)


@pytest.mark.parametrize("wide", [torch.float32, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_constant_mask_of_one_lane_writes_one_lane(dtype, wide):
    """LLVM 22 writes the untruncated element of such a store."""
    y = torch.full((N,), 3, dtype=dtype)
    first_kernel[(1,)](y, torch.full((N,), 77, dtype=wide), N=N)
    assert y.tolist() == [77] + [3] * (N - 1)


@triton.jit
def matrix_kernel(y, x, rows, columns, row_step, column_step, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    m = (i < rows) & (j < columns)
    at = i * row_step + j * column_step
    tl.store(y + at, tl.load(x + at, mask=m, other=0) * 2, mask=m)


@pytest.mark.parametrize("by_rows", [True, False], ids=["rows", "columns"])
def test_memory_ends_with_the_last_row_and_column(by_rows):
    for rows, columns in itertools.product((1, 3, 8), (1, 5, 16, 31, 32)):
        shape = (rows, columns) if by_rows else (columns, rows)
        x, y = guarded(torch.randn(shape)), guarded(torch.zeros(shape))
        steps = (columns, 1) if by_rows else (1, rows)
        matrix_kernel[(1,)](y.tensor, x.tensor, rows, columns, *steps, M=8, N=32)
        assert torch.equal(y.tensor, x.tensor * 2), (rows, columns)
        assert y.intact()


@triton.jit
def square_kernel(copied, sums, product, x, a, b, KIND: tl.constexpr, N: tl.constexpr):
    """One comparison for the rows, the columns and the inner axis of a product."""
    o = tl.arange(0, N)
    m = mask_of(o, a, b, KIND)
    mm = m[:, None] & m[None, :]
    at = o[:, None] * N + o[None, :]
    tile = tl.load(x + at, mask=mm, other=0.0)
    tl.store(copied + at, tile)
    tl.store(copied + N * N + at, tl.load(x + at), mask=mm)
    tl.store(sums + o, tl.sum(tile, 0))
    tl.store(sums + N + o, tl.sum(tile, 1))
    tl.store(product + at, tl.dot(tile, tl.trans(tile), input_precision="ieee"), mask=mm)


@pytest.mark.parametrize("kind", ["o < a", "o >= a", "o != a", "a <= o < b"])
@pytest.mark.parametrize("size", [16, 32])
def test_one_comparison_may_mask_several_axes(kind, size):
    torch.manual_seed(0)
    x, o = torch.randn(size, size), torch.arange(size)
    for a, b in ((3, 9), (11, 14), (15, 16)):
        copied, sums, product = torch.zeros(2, size, size), torch.zeros(2, size), torch.zeros(size, size)
        square_kernel[(1,)](copied, sums, product, x, a, b, KIND=kind, N=size)
        m = (PREFIXES | OTHERS)[kind](o, a, b)
        want = x * m * m[:, None]
        assert torch.equal(copied[0], want)
        assert torch.equal(copied[1], want)
        torch.testing.assert_close(sums, torch.stack([want.sum(0), want.sum(1)]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(product, want @ want.T, rtol=1e-5, atol=1e-5)


@triton.jit
def biased_kernel(c, a, b, bias, n, N: tl.constexpr, K: tl.constexpr):
    """One comparison for the rows of a product and for the columns of what it is added to."""
    o, k = tl.arange(0, N), tl.arange(0, K)
    m = o < n
    x = tl.load(a + o[:, None] * K + k[None, :], mask=m[:, None], other=0.0)
    y = tl.load(b + k[:, None] + o[None, :] * K)
    start = tl.broadcast_to(tl.load(bias + o, mask=m, other=0.0)[None, :], (N, N))
    tl.store(c + o[:, None] * N + o[None, :], tl.dot(x, y, start, input_precision="ieee"), mask=m[:, None])


@pytest.mark.parametrize("n", [1, 5, 16])
def test_a_comparison_of_rows_may_mask_where_the_sums_start(n):
    torch.manual_seed(0)
    a, b, bias, c = torch.randn(16, 32), torch.randn(16, 32), torch.randn(16), torch.zeros(16, 16)
    biased_kernel[(1,)](c, a, b, bias, n, N=16, K=32)
    rows = (torch.arange(16) < n).float()
    torch.testing.assert_close(c, (a @ b.T + bias * rows) * rows[:, None], rtol=1e-5, atol=1e-5)


@triton.jit
def matmul_kernel(c, a, b, m, n, k, b_k, b_n, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    i, j, o = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    acc = tl.zeros((M, N), tl.float32)
    for start in range(0, k, K):
        left = (i < m)[:, None] & (o < k - start)[None, :]
        right = (o < k - start)[:, None] & (j < n)[None, :]
        x = tl.load(a + i[:, None] * k + (start + o)[None, :], mask=left, other=0.0)
        y = tl.load(b + (start + o)[:, None] * b_k + j[None, :] * b_n, mask=right, other=0.0)
        acc = tl.dot(x, y, acc, input_precision="ieee")
    tl.store(c + i[:, None] * n + j[None, :], acc, mask=(i < m)[:, None] & (j < n)[None, :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("along_k", [True, False], ids=["b by columns", "b by rows"])
def test_products_of_any_size_read_no_further_than_their_operands(dtype, along_k):
    torch.manual_seed(0)
    for m, n, k in itertools.product((1, 5, 16), (3, 16), (1, 15, 32, 33, 70)):
        a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
        left, right = guarded(a).tensor, guarded(b.T.contiguous() if along_k else b).tensor
        c = guarded(torch.zeros(m, n))
        matmul_kernel[(1,)](c.tensor, left, right, m, n, k, *((1, k) if along_k else (n, 1)), M=16, N=16, K=32)
        torch.testing.assert_close(c.tensor, a.float() @ b.float(), rtol=1e-5, atol=1e-5)
        assert c.intact()


@triton.jit
def continued_kernel(c, a, b, n, N: tl.constexpr, K: tl.constexpr):
    """A product added to what its own rows hold already."""
    o, k = tl.arange(0, N), tl.arange(0, K)
    m = (o < n)[:, None]
    x = tl.load(a + o[:, None] * K + k[None, :], mask=m, other=0.0)
    y = tl.load(b + k[:, None] + o[None, :] * K)
    at = c + o[:, None] * N + o[None, :]
    tl.store(at, tl.dot(x, y, tl.load(at, mask=m, other=0.0), input_precision="ieee"), mask=m)


@pytest.mark.parametrize("n", [1, 3, 5, 16])
def test_where_sums_start_is_read_no_further_than_the_rows(n):
    torch.manual_seed(0)
    a, b, c = torch.randn(n, 32), torch.randn(16, 32), torch.randn(n, 16)
    got = guarded(c)
    continued_kernel[(1,)](got.tensor, guarded(a).tensor, b, n, N=16, K=32)
    torch.testing.assert_close(got.tensor, a @ b.T + c, rtol=1e-5, atol=1e-5)
    assert got.intact()
