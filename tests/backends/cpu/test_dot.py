"""Products: right from size 1 on, in every type; a sum's bits depend on the access pattern and BLOCK_K alone."""

import itertools

import pytest
import torch
import triton
import triton.language as tl

from lychee.backends.cpu import activated, demand
from tests.backends.cpu.stages import func_of, run

TYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _on_the_cpu():
    with activated():
        yield


@triton.jit
def product_kernel(
    c, a, b, rows, columns, depth, a_m, a_k, b_k, b_n, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    i = tl.program_id(0) * M + tl.arange(0, M)
    j = tl.program_id(1) * N + tl.arange(0, N)
    o = tl.arange(0, K)
    if c.dtype.element_ty == tl.int32:
        acc = tl.zeros((M, N), tl.int32)
    elif c.dtype.element_ty == tl.float64:
        acc = tl.zeros((M, N), tl.float64)
    else:
        acc = tl.zeros((M, N), tl.float32)
    for start in range(0, depth, K):
        k = start + o
        left = tl.load(
            a + i[:, None] * a_m + k[None, :] * a_k, mask=(i < rows)[:, None] & (k < depth)[None, :], other=0
        )
        right = tl.load(
            b + k[:, None] * b_k + j[None, :] * b_n, mask=(k < depth)[:, None] & (j < columns)[None, :], other=0
        )
        acc = tl.dot(left, right, acc, input_precision="ieee", out_dtype=acc.dtype)
    tl.store(c + i[:, None] * columns + j[None, :], acc, mask=(i < rows)[:, None] & (j < columns)[None, :])


# Which of its axes each operand is contiguous along; the other is strided.
FORMS = list(itertools.product("mk", "kn"))


def laid(a, b, form):
    """The matrices [rows, depth] and [depth, columns], in memory as the form says."""
    return a if form[0] == "k" else a.T.contiguous().T, b if form[1] == "n" else b.T.contiguous().T


def product(a, b, form=("k", "k"), out=torch.float32, m=16, n=16, k=32):
    """a b, in tiles of m, n and k."""
    a, b = laid(a, b, form)
    return strided_product(a, b, out, m, n, k)


def strided_product(a, b, out=torch.float32, m=16, n=16, k=32):
    (rows, depth), columns = a.shape, b.shape[1]
    c = torch.full((rows, columns), 99, dtype=out)
    grid = (triton.cdiv(rows, m), triton.cdiv(columns, n))
    product_kernel[grid](c, a, b, rows, columns, depth, *a.stride(), *b.stride(), M=m, N=n, K=k)
    return c


def drawn(rows, depth, columns, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(rows, depth).to(dtype), torch.randn(depth, columns).to(dtype)


@pytest.mark.parametrize("form", FORMS, ids="".join)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_products_of_any_size_are_right(dtype, form):
    for rows, depth, columns in [(1, 1, 1), (1, 70, 1), (3, 33, 5), (17, 2, 9), (5, 64, 40), (40, 100, 3)]:
        a, b = drawn(rows, depth, columns, dtype)
        want = (a.double() @ b.double()).float()
        torch.testing.assert_close(product(a, b, form), want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_tiles_may_be_as_small_as_one_element(size):
    a, b = drawn(5, 9, 6)
    for form in FORMS:
        got = product(a, b, form, m=size, n=size, k=size)
        torch.testing.assert_close(got, a @ b, rtol=1e-5, atol=1e-5)


FEW_TILES = [(1, 1), (1, 16), (4, 4), (64, 16)]
MORE_TILES = [(2, 16), (8, 32), (16, 1), (16, 2), (16, 64), (32, 8)]


@pytest.mark.parametrize("tiles", [FEW_TILES, pytest.param(MORE_TILES, marks=pytest.mark.slow)], ids=["few", "more"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids="".join)
def test_bits_do_not_depend_on_the_tile_of_outputs(form, dtype, tiles):
    """Nor on how many rows and columns there are, so not on masks."""
    a, b = drawn(21, 200, 37, dtype)
    want = product(a, b, form)
    for m, n in tiles:
        assert torch.equal(product(a, b, form, m=m, n=n), want), (m, n)
    a, b = laid(a, b, form)
    for rows, columns in [(1, 37), (2, 1), (21, 5), (7, 36)]:
        got = strided_product(a[:rows], b[:, :columns])
        assert torch.equal(got, want[:rows, :columns]), (rows, columns)


@triton.jit
def held_kernel(c, a, b, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Operands that are computed, and so come from buffers."""
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.exp(tl.load(a + i[:, None] * K + k[None, :]))
    right = tl.exp(tl.load(b + k[:, None] * N + j[None, :]))
    tl.store(c + i[:, None] * N + j[None, :], tl.dot(left, right, input_precision="ieee"))


def test_bits_of_a_product_of_computed_tiles_do_not_depend_on_their_sizes():
    a, b = drawn(32, 64, 32)
    want = torch.zeros(32, 32)
    held_kernel[(1,)](want, a, b, M=32, N=32, K=64)
    torch.testing.assert_close(want, a.exp() @ b.exp(), rtol=1e-5, atol=1e-5)
    for m, n in itertools.product((1, 2, 8, 32), (1, 4, 32)):
        got = torch.zeros(m, n)
        held_kernel[(1,)](got, a, b[:, :n].contiguous(), M=m, N=n, K=64)
        assert torch.equal(got, want[:m, :n]), (m, n)


@triton.jit
def halves_kernel(c, a, b, rows, columns, depth, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    """Two products add to one sum: of the first and of the second half of every 2 K elements."""
    i, j = tl.arange(0, M), tl.arange(0, N)
    if ROWS > 0:
        rows = ROWS
    acc = tl.zeros((M, N), tl.float32)
    for start in range(0, depth, 2 * K):
        k = start + tl.arange(0, K)
        left = a + i[:, None] * depth + k[None, :]
        right = b + j[None, :] * depth + k[:, None]
        seen, wanted = (i < rows)[:, None], (j < columns)[None, :]
        acc = tl.dot(tl.load(left, mask=seen, other=0), tl.load(right, mask=wanted, other=0), acc)
        acc = tl.dot(tl.load(left + K, mask=seen, other=0), tl.load(right + K, mask=wanted, other=0), acc)
    tl.store(c + i[:, None] + j[None, :] * rows, acc, mask=(i < rows)[:, None] & (j < columns)[None, :])


@pytest.mark.parametrize("rows", [1, 3, 5, 7, 8, 11, 16])
def test_products_that_add_to_one_sum_are_right_for_every_number_of_rows(rows):
    """Also where that number is known, and the result is stored by columns."""
    a, b = drawn(rows, 192, 9)
    b = b.T.contiguous()
    found = []
    for known, n in itertools.product((0, rows), (16, 32)):
        c = torch.zeros(9, rows)
        halves_kernel[(1,)](c, a, b, rows, 9, 192, M=16, N=n, K=32, ROWS=known)
        torch.testing.assert_close(c, b @ a.T, rtol=1e-5, atol=1e-5)
        found.append(c)
    assert all(torch.equal(c, found[0]) for c in found)


def test_a_sum_along_k_is_partial_sums_over_lanes_then_a_tree():
    """Spelt out for four lanes' worth of eights, so that no change of order goes unseen on any vector width."""
    a, b = drawn(1, 64, 1)
    products = (a[0] * b[:, 0]).double()
    got = product(a, b, k=64).item()
    orders = []
    for lanes in (4, 8, 16):
        partial = torch.zeros(lanes)
        for start in range(0, 64, lanes):
            partial = (products[start : start + lanes] + partial.double()).float()  # one rounding: an fma
        while len(partial) > 1:
            partial = partial[: len(partial) // 2] + partial[len(partial) // 2 :]
        orders.append(partial.item())
    exact = [(a[0].double() * b[:, 0].double()).sum().item()]
    assert got in orders, (got, orders, exact)


@pytest.mark.parametrize("form", FORMS, ids="".join)
def test_int8_products_accumulate_in_int32(form):
    torch.manual_seed(0)
    for rows, depth, columns in [(1, 1, 1), (5, 300, 9), (16, 64, 33)]:
        a, b = (torch.randint(-128, 128, s, dtype=torch.int8) for s in ((rows, depth), (depth, columns)))
        assert torch.equal(product(a, b, form, torch.int32), (a.long() @ b.long()).int())
    low = torch.full((1, 1024), -128, dtype=torch.int8)
    assert product(low, low.T.contiguous(), form, torch.int32).item() == 1024 * 2**14


@pytest.mark.parametrize("form", FORMS, ids="".join)
def test_fp64_products_are_summed_in_fp64(form):
    a, b = (x.double() for x in drawn(9, 100, 7))
    a[0, 0], b[0, 0] = 1e-12, 1.0
    torch.testing.assert_close(product(a, b, form, torch.float64), a @ b, rtol=1e-14, atol=1e-13)


def test_half_precision_products_are_summed_in_fp32():
    ones = torch.ones(1, 4097, dtype=torch.float16)
    assert product(ones, ones.T.contiguous(), out=torch.float32).item() == 4097.0


@triton.jit
def observed_kernel(c, sums, a, b, rows, B: tl.constexpr):
    o = tl.arange(0, B)
    at = o[:, None] * B + o[None, :]
    acc = tl.dot(tl.load(a + at, mask=(o < rows)[:, None], other=1.0), tl.load(b + at), input_precision="ieee")
    tl.store(c + at, acc, mask=(o < rows)[:, None])
    tl.store(sums + o, tl.sum(acc, 0))


def observed(rows):
    a, b = drawn(16, 16, 16)
    c, sums = torch.zeros(16, 16), torch.zeros(16)
    run(func_of(observed_kernel, c, sums, a, b, rows, B=16), c, sums, a, b, rows)
    a[rows:] = 1.0
    torch.testing.assert_close(c[:rows], (a @ b)[:rows], rtol=1e-5, atol=1e-5)
    assert not c[rows:].any()
    torch.testing.assert_close(sums, (a @ b).sum(0), rtol=1e-5, atol=1e-5)


def test_rows_that_are_not_stored_count_where_they_are_looked_at(monkeypatch):
    for rows in (2, 3, 11, 16):
        observed(rows)
    watched = demand.watched

    def stores_alone(f, value):
        uses = {v: [op for op in ops if op.name == "tt.store"] for v, ops in f.uses.items()}
        monkeypatch.setattr(f, "uses", uses)
        return watched(f, value)

    monkeypatch.setattr(demand, "watched", stores_alone)
    with pytest.raises(AssertionError):  # the sum sees them: without the rule it is wrong
        observed(3)


@triton.jit
def counted_kernel(c, out, a, b, trips, K: tl.constexpr, B: tl.constexpr, WATCHED: tl.constexpr):
    """A loop of one product that carries a scalar too; watched, it also stores in every trip."""
    o, k = tl.arange(0, B), tl.arange(0, K)
    acc = tl.full((B, B), 0.5, tl.float32)
    start = 0
    for trip in range(trips):
        left = tl.load(a + o[:, None] * K * trips + (start + k)[None, :])
        right = tl.load(b + (start + k)[:, None] + o[None, :] * K * trips)
        acc = tl.dot(left, right, acc, input_precision="ieee")
        start += K
        if WATCHED:
            tl.store(out + trip, start)
    tl.store(c + o[:, None] * B + o[None, :], acc)
    tl.store(out + trips, start)


def test_a_loop_turned_inside_out_gives_the_bits_of_the_loop_as_written():
    a, b = drawn(16, 96, 16)
    results = []
    for watched in (False, True):
        c, out = torch.zeros(16, 16), torch.zeros(4, dtype=torch.int32)
        counted_kernel[(1,)](c, out, a, b.T.contiguous(), 3, K=32, B=16, WATCHED=watched)
        assert out[3].item() == 96
        results.append(c)
    assert torch.equal(*results)
    torch.testing.assert_close(results[0], a @ b + 0.5, rtol=1e-5, atol=1e-5)


@triton.jit
def tail_kernel(c, a, b, trips, depth, K: tl.constexpr, B: tl.constexpr):
    """Pointers moved by the loop are used after it."""
    o, k = tl.arange(0, B), tl.arange(0, K)
    acc = tl.zeros((B, B), tl.float32)
    left = a + o[:, None] * depth + k[None, :]
    right = b + k[:, None] + o[None, :] * depth
    for _ in range(trips):
        acc = tl.dot(tl.load(left), tl.load(right), acc, input_precision="ieee")
        left += K
        right += K
    rest = depth - trips * K
    x = tl.load(left, mask=(k < rest)[None, :], other=0.0)
    y = tl.load(right, mask=(k < rest)[:, None], other=0.0)
    tl.store(c + o[:, None] * B + o[None, :], tl.dot(x, y, acc, input_precision="ieee"))


@pytest.mark.parametrize("depth", [3, 35, 70, 96])
def test_pointers_are_where_a_loop_of_products_left_them(depth):
    a, b = drawn(16, depth, 16)
    c = torch.zeros(16, 16)
    tail_kernel[(1,)](c, a, b.T.contiguous(), depth // 32, depth, K=32, B=16)
    torch.testing.assert_close(c, a @ b, rtol=1e-5, atol=1e-5)


@triton.jit
def chain_kernel(c, a, b, B: tl.constexpr):
    o = tl.arange(0, B)
    at = o[:, None] * B + o[None, :]
    x, y = tl.load(a + at), tl.load(b + at)
    xy = tl.dot(x, y, input_precision="ieee")
    tl.store(c + at, tl.dot(xy, tl.trans(xy), acc=x, input_precision="ieee"))


def test_a_product_may_be_an_operand_twice():
    a, b = drawn(16, 16, 16)
    c = torch.zeros(16, 16)
    chain_kernel[(1,)](c, a, b, B=16)
    torch.testing.assert_close(c, a @ b @ (a @ b).T + a, rtol=1e-5, atol=1e-4)


@triton.jit
def remembering_kernel(sums, seen, a, b, trips, OWN: tl.constexpr, N: tl.constexpr):
    """A carried sum that something else than its product looks at: later in the trip, or as a factor."""
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    acc, total = tl.zeros((N, N), tl.float32), tl.zeros((N, N), tl.float32)
    for _ in range(trips):
        x = tl.load(a + at)
        if OWN:
            x += acc
        grown = tl.dot(x, tl.load(b + at), acc * 0.5, input_precision="ieee")
        total += acc * 2
        acc = grown
    tl.store(sums + at, acc)
    tl.store(seen + at, total)


@pytest.mark.parametrize("own", [False, True])
def test_a_carried_sum_that_others_look_at_does_not_grow_under_their_eyes(own):
    torch.manual_seed(0)
    a, b = torch.randn(16, 16) * 0.1, torch.randn(16, 16) * 0.1
    sums, seen = torch.zeros(16, 16), torch.zeros(16, 16)
    with activated():
        remembering_kernel[(1,)](sums, seen, a, b, 3, OWN=own, N=16)
    acc, total = torch.zeros(16, 16), torch.zeros(16, 16)
    for _ in range(3):
        grown = (a + acc if own else a) @ b + acc * 0.5
        acc, total = grown, total + acc * 2
    torch.testing.assert_close(sums, acc, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(seen, total, rtol=1e-5, atol=1e-5)
