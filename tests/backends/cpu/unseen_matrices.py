"""Unseen kernels over matrices and images: products in odd forms, convolutions, solves, tiles moved about."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from tests.backends.cpu.cases import EPSILON, FLOATS, Case, Check
from tests.backends.cpu.memory import guard


@triton.jit
def transpose_kernel(x_ptr, out_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    tile = tl.load(x_ptr + rows[:, None] * N + columns[None, :], mask=inside)
    tl.store(out_ptr + columns[:, None] * M + rows[None, :], tl.trans(tile), mask=tl.trans(inside))


def transpose(dtype: torch.dtype) -> Iterator[Check]:
    for m, n in ((33, 20), (16, 8), (1, 9)):
        x, out = guard(torch.randint(-99, 99, (m, n)).to(dtype), torch.zeros(n, m, dtype=dtype))
        transpose_kernel[(triton.cdiv(m, 16), triton.cdiv(n, 8))](x, out, m, n, 16, 8)
        yield Check(f"{m}x{n}", out, x.T.contiguous(), 0.0)


@triton.jit
def int8_matmul_kernel(
    a_ptr, b_ptr, scale_ptr, raw_ptr, out_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.int32)
    for k in range(0, K, BK):
        a_mask = (rows[:, None] < M) & (k + inner[None, :] < K)
        b_mask = (k + inner[:, None] < K) & (columns[None, :] < N)
        a = tl.load(a_ptr + rows[:, None] * K + k + inner[None, :], mask=a_mask, other=0)
        b = tl.load(b_ptr + columns[None, :] * K + k + inner[:, None], mask=b_mask, other=0)
        total = tl.dot(a, b, total, out_dtype=tl.int32)
    at = rows[:, None] * N + columns[None, :]
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    scale = tl.load(scale_ptr + columns, mask=columns < N, other=0.0)
    tl.store(raw_ptr + at, total, mask=inside)
    tl.store(out_ptr + at, total.to(tl.float32) * scale[None, :], mask=inside)


def int8_matmul(dtype: torch.dtype) -> Iterator[Check]:
    for m, n, k in ((1, 40, 64), (9, 33, 100), (16, 16, 512)):
        a, b = guard(*(torch.randint(-128, 128, (rows, k), dtype=torch.int8) for rows in (m, n)))
        scale, out, raw = guard(torch.rand(n), torch.zeros(m, n), torch.zeros(m, n, dtype=torch.int32))
        int8_matmul_kernel[(triton.cdiv(m, 8), triton.cdiv(n, 16))](a, b, scale, raw, out, m, n, k, 8, 16, 32)
        want = a.int() @ b.int().T
        yield Check("sums", raw, want)
        yield Check("scaled", out, want * scale)


@triton.jit
def conv1d_kernel(x_ptr, w_ptr, out_ptr, channels, length, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    """Depthwise and causal, over time."""
    channel = tl.program_id(1)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x_ptr += channel * length
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        at = t + tap - (TAPS - 1)
        x = tl.load(x_ptr + at, mask=(at >= 0) & (at < length), other=0.0)
        total += x * tl.load(w_ptr + channel * TAPS + tap)
    tl.store(out_ptr + channel * length + t, total, mask=t < length)


def conv1d(dtype: torch.dtype) -> Iterator[Check]:
    channels, length, taps = 3, 45, 4
    x, w = guard(torch.randn(channels, length).to(dtype), torch.randn(channels, taps).to(dtype))
    (out,) = guard(torch.zeros(channels, length, dtype=dtype))
    conv1d_kernel[(3, channels)](x, w, out, channels, length, taps, BLOCK=16)
    padded = torch.nn.functional.pad(x.float(), (taps - 1, 0))
    want = torch.nn.functional.conv1d(padded[None], w.float()[:, None], groups=channels)[0]
    yield Check("causal", out, want.to(dtype), 2 * EPSILON[dtype])


@triton.jit
def conv2d_kernel(
    x_ptr, w_ptr, out_ptr, C, H, W, OUT, PAD: tl.constexpr, STRIDE: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Direct: a tile of output channels by a tile of output pixels, three nested loops."""
    out_h = (H + 2 * PAD - SIZE) // STRIDE + 1
    out_w = (W + 2 * PAD - SIZE) // STRIDE + 1
    pixel = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    y, x = pixel // out_w, pixel % out_w
    total = tl.zeros((BLOCK_O, BLOCK_P), dtype=tl.float32)
    for c in range(C):
        for dy in range(SIZE):
            for dx in range(SIZE):
                at_y = y * STRIDE + dy - PAD
                at_x = x * STRIDE + dx - PAD
                inside = (at_y >= 0) & (at_y < H) & (at_x >= 0) & (at_x < W) & (pixel < out_h * out_w)
                value = tl.load(x_ptr + (c * H + at_y) * W + at_x, mask=inside, other=0.0)
                weight = tl.load(w_ptr + ((o * C + c) * SIZE + dy) * SIZE + dx, mask=o < OUT, other=0.0)
                total += weight[:, None] * value[None, :]
    at = o[:, None] * (out_h * out_w) + pixel[None, :]
    tl.store(out_ptr + at, total, mask=(o[:, None] < OUT) & (pixel[None, :] < out_h * out_w))


def conv2d(dtype: torch.dtype) -> Iterator[Check]:
    for pad, stride, size in ((1, 1, 3), (0, 2, 2)):
        x, w = guard(torch.randn(2, 7, 9), torch.randn(5, 2, size, size))
        want = torch.nn.functional.conv2d(x[None], w, stride=stride, padding=pad)[0]
        (out,) = guard(torch.zeros(want.shape))
        grid = (triton.cdiv(want[0].numel(), 16), 2)
        conv2d_kernel[grid](x, w, out, 2, 7, 9, 5, pad, stride, size, 4, 16)
        yield Check(f"pad {pad} stride {stride}", out, want)


@triton.jit
def block_sparse_kernel(a_ptr, b_ptr, begin_ptr, column_ptr, out_ptr, N, BLOCK: tl.constexpr):
    """Block compressed rows: a data-dependent number of blocks per program, at data-dependent columns."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inner = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for block in range(tl.load(begin_ptr + row), tl.load(begin_ptr + row + 1)):
        k = tl.load(column_ptr + block)
        a = tl.load(a_ptr + block * BLOCK * BLOCK + inner[:, None] * BLOCK + inner[None, :])
        b_at = (k * BLOCK + inner)[:, None] * N + columns[None, :]
        b = tl.load(b_ptr + b_at, mask=columns[None, :] < N, other=0.0)
        total += tl.dot(a, b, input_precision="ieee")
    at = (row * BLOCK + inner)[:, None] * N + columns[None, :]
    tl.store(out_ptr + at, total, mask=columns[None, :] < N)


def block_sparse(dtype: torch.dtype) -> Iterator[Check]:
    size, n = 8, 21
    present = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]]).bool()
    blocks = torch.randn(int(present.sum()), size, size).to(dtype)
    dense = torch.zeros(4, 3, size, size)
    dense[present] = blocks.float()
    dense = dense.transpose(1, 2).reshape(4 * size, 3 * size)
    begin = torch.cat([torch.zeros(1), present.sum(1).cumsum(0)]).int()
    b = torch.randn(3 * size, n).to(dtype)
    args = guard(blocks, b, begin, present.nonzero()[:, 1].int(), torch.zeros(4 * size, n))
    block_sparse_kernel[(4, 3)](*args, n, BLOCK=size)
    yield Check("product", args[-1], dense @ b.float(), EPSILON[dtype])


@triton.jit
def triangular_solve_kernel(l_ptr, b_ptr, n, N: tl.constexpr):
    """Forward substitution in place: each step stores an entry of x that the next step's load must see."""
    column = tl.program_id(0)
    at = tl.arange(0, N)
    for i in range(n):
        known = tl.load(b_ptr + column * n + at, mask=at < i, other=0.0)
        row = tl.load(l_ptr + i * n + at, mask=at < i, other=0.0)
        left = tl.load(b_ptr + column * n + i) - tl.sum(known * row, axis=0)
        tl.store(b_ptr + column * n + i, left / tl.load(l_ptr + i * n + i))


def triangular_solve(dtype: torch.dtype) -> Iterator[Check]:
    n, columns = 13, 3
    lower = torch.rand(n, n).tril() + torch.eye(n)
    right = torch.randn(columns, n)
    lower, x = guard(lower, right)
    triangular_solve_kernel[(columns,)](lower, x, n, N=16)
    want = torch.linalg.solve_triangular(lower, right.T, upper=False).T.contiguous()
    yield Check("solution", x, want, 1e-3)


@triton.jit
def kmeans_kernel(x_ptr, c_ptr, label_ptr, cost_ptr, n, k, D: tl.constexpr, BLOCK: tl.constexpr, CENTRES: tl.constexpr):
    """Nearest centre by squared distance, |c|^2 - 2 x.c, and the sum of the costs by an atomic."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    centres = tl.arange(0, CENTRES)
    d = tl.arange(0, D)
    x = tl.load(x_ptr + rows[:, None] * D + d[None, :], mask=rows[:, None] < n, other=0.0)
    c = tl.load(c_ptr + centres[:, None] * D + d[None, :], mask=centres[:, None] < k, other=0.0)
    distance = tl.sum(c * c, axis=1)[None, :] - 2.0 * tl.dot(x, tl.trans(c), input_precision="ieee")
    distance = tl.where(centres[None, :] < k, distance, float("inf"))
    best, label = tl.min(distance, axis=1, return_indices=True)
    tl.store(label_ptr + rows, label.to(tl.int64), mask=rows < n)
    cost = tl.where(rows < n, best + tl.sum(x * x, axis=1), 0.0)
    tl.atomic_add(cost_ptr, tl.sum(cost, axis=0))


def kmeans(dtype: torch.dtype) -> Iterator[Check]:
    n, k, d = 50, 5, 8
    x, c = guard(torch.randint(-9, 9, (n, d)).float(), torch.randint(-9, 9, (k, d)).float())
    label, cost = guard(torch.zeros(n, dtype=torch.int64), torch.zeros(1))
    kmeans_kernel[(4,)](x, c, label, cost, n, k, d, 16, 8)
    squared = (x[:, None] - c[None]).square().sum(-1)
    yield Check("labels", label, squared.argmin(1))
    yield Check("cost", cost, squared.min(1).values.sum()[None], 0.0)


@triton.jit
def batched_bilinear_kernel(x_ptr, a_ptr, y_ptr, out_ptr, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """x' A y for every pair of a batch of tiles: three-dimensional tiles, broadcast over different axes."""
    b = tl.arange(0, B)[:, None, None]
    m = tl.arange(0, M)[None, :, None]
    n = tl.arange(0, N)[None, None, :]
    x = tl.load(x_ptr + b * M + m)
    y = tl.load(y_ptr + b * N + n)
    a = tl.load(a_ptr + (b * M + m) * N + n)
    tl.store(out_ptr + tl.arange(0, B), tl.sum(tl.sum(x * a * y, axis=2), axis=1))


def batched_bilinear(dtype: torch.dtype) -> Iterator[Check]:
    for b, m, n in ((4, 8, 16), (1, 2, 4), (8, 1, 1)):
        x, a, y, out = guard(torch.randn(b, m), torch.randn(b, m, n), torch.randn(b, n), torch.zeros(b))
        batched_bilinear_kernel[(1,)](x, a, y, out, b, m, n)
        yield Check(f"{b}x{m}x{n}", out, torch.einsum("bm,bmn,bn->b", x, a, y))


@triton.jit
def stencil_kernel(x_ptr, n, steps, BLOCK: tl.constexpr):
    """Jacobi sweeps in place: every lane must have read its neighbours before any lane writes."""
    at = tl.arange(0, BLOCK)
    inner = (at > 0) & (at < n - 1)
    for _ in range(steps):
        left = tl.load(x_ptr + at - 1, mask=inner, other=0.0)
        right = tl.load(x_ptr + at + 1, mask=inner, other=0.0)
        tl.store(x_ptr + at, (left + right) * 0.5, mask=inner)


def stencil(dtype: torch.dtype) -> Iterator[Check]:
    n = 51
    x = torch.randint(-64, 64, (n,)).float() * 16
    want = x.clone()
    (x,) = guard(x)
    stencil_kernel[(1,)](x, n, 4, BLOCK=64)
    for _ in range(4):
        want[1:-1] = (want[:-2] + want[2:]) * 0.5
    yield Check("four sweeps", x, want, 0.0)


@triton.jit
def life_kernel(now_ptr, next_ptr, H, W, BH: tl.constexpr, BW: tl.constexpr):
    """A 3x3 neighbourhood that wraps around, in int8 and bool."""
    y = tl.program_id(0) * BH + tl.arange(0, BH)[:, None]
    x = tl.program_id(1) * BW + tl.arange(0, BW)[None, :]
    inside = (y < H) & (x < W)
    alive = tl.zeros((BH, BW), dtype=tl.int8)
    for dy in tl.static_range(-1, 2):
        for dx in tl.static_range(-1, 2):
            if dy != 0 or dx != 0:
                at = ((y + dy + H) % H) * W + (x + dx + W) % W
                alive += tl.load(now_ptr + at, mask=inside, other=0).to(tl.int8)
    lives = tl.load(now_ptr + y * W + x, mask=inside, other=0) != 0
    tl.store(next_ptr + y * W + x, (alive == 3) | (lives & (alive == 2)), mask=inside)


def life(dtype: torch.dtype) -> Iterator[Check]:
    h, w = 11, 19
    now, after = guard(torch.rand(h, w) > 0.6, torch.zeros(h, w, dtype=torch.bool))
    life_kernel[(2, 2)](now, after, h, w, 8, 16)
    shifts = [(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1) if (a, b) != (0, 0)]
    count = sum(now.int().roll(s, (0, 1)) for s in shifts)
    yield Check("next generation", after, (count == 3) | (now & (count == 2)))


CASES = (
    Case(transpose, (torch.float32, torch.float16, torch.int8, torch.int64)),
    Case(int8_matmul),
    Case(conv1d, FLOATS),
    Case(conv2d),
    Case(block_sparse, FLOATS),
    Case(triangular_solve),
    Case(kmeans),
    Case(batched_bilinear),
    Case(stencil),
    Case(life),
)
