"""Unseen kernels about numbers: bits, wrap-around, conversions, iterations whose length the data decides."""

from collections.abc import Iterator

import numpy as np
import torch
import triton
import triton.language as tl

from tests.backends.cpu.cases import EPSILON, FLOATS, Case, Check
from tests.backends.cpu.memory import guard
from tests.backends.cpu.philox_reference import bits


@triton.jit
def pack_int4_kernel(x_ptr, packed_ptr, scale_ptr, groups, GROUP: tl.constexpr):
    """Symmetric int4 per group of GROUP values; the low nibble is the even value."""
    group = tl.program_id(0)
    pair = tl.arange(0, GROUP // 2)
    even = tl.load(x_ptr + group * GROUP + 2 * pair)
    odd = tl.load(x_ptr + group * GROUP + 2 * pair + 1)
    scale = tl.maximum(tl.max(tl.abs(even), axis=0), tl.max(tl.abs(odd), axis=0)) / 7.0
    scale = tl.where(scale == 0.0, 1.0, scale)
    low = tl.floor(even / scale + 0.5).to(tl.int32)
    high = tl.floor(odd / scale + 0.5).to(tl.int32)
    tl.store(packed_ptr + group * (GROUP // 2) + pair, ((low & 15) | (high << 4)).to(tl.uint8))
    tl.store(scale_ptr + group, scale)


@triton.jit
def unpack_int4_kernel(packed_ptr, scale_ptr, out_ptr, GROUP: tl.constexpr):
    group = tl.program_id(0)
    packed = tl.load(packed_ptr + group * (GROUP // 2) + tl.arange(0, GROUP // 2)).to(tl.int8, bitcast=True)
    low = (packed << 4) >> 4
    high = packed >> 4
    values = tl.interleave(low, high).to(tl.float32) * tl.load(scale_ptr + group)
    tl.store(out_ptr + group * GROUP + tl.arange(0, GROUP), values)


def int4_round_trip(dtype: torch.dtype) -> Iterator[Check]:
    groups, size = 3, 32
    x = torch.randint(-7, 8, (groups, size)).float() * torch.tensor([0.5, 2.0, 0.0])[:, None]
    x[:2, 3] = torch.tensor([-3.5, 14.0])
    args = guard(x, torch.zeros(groups, size // 2, dtype=torch.uint8), torch.zeros(groups), torch.zeros(groups, size))
    pack_int4_kernel[(groups,)](args[0], args[1], args[2], groups, size)
    unpack_int4_kernel[(groups,)](args[1], args[2], args[3], size)
    nibbles = (x / torch.tensor([0.5, 2.0, 1.0])[:, None]).int() & 15
    yield Check("packed", args[1], (nibbles[:, ::2] | (nibbles[:, 1::2] << 4)).to(torch.uint8))
    yield Check("round trip", args[3], x, 0.0)


@triton.jit
def rolling_hash_kernel(x_ptr, out_ptr, n, window, BASE: tl.constexpr, BLOCK: tl.constexpr):
    """A polynomial hash of the `window` bytes from each place on, modulo 2**64."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = at + window <= n
    hash_ = tl.zeros([BLOCK], dtype=tl.int64)
    for i in range(window):
        x = tl.load(x_ptr + at + i, mask=valid, other=0)
        hash_ = hash_ * BASE + x.to(tl.int64)
    hash_ = (hash_ ^ (hash_ >> 29)) * 0x1F58476D1CE4E5B9
    tl.store(out_ptr + at, hash_, mask=valid)


def rolling_hash(dtype: torch.dtype) -> Iterator[Check]:
    n, window = 50, 11
    x = torch.randint(-128, 128, (n,), dtype=torch.int8)
    want = []
    for start in range(n - window + 1):
        value = 0
        for byte in x[start : start + window].tolist():
            value = value * 0x100000001B3 + byte
        value = (value + 2**63) % 2**64 - 2**63
        value = (value ^ (value >> 29)) * 0x1F58476D1CE4E5B9
        want.append((value + 2**63) % 2**64 - 2**63)
    x, out = guard(x, torch.zeros(len(want), dtype=torch.int64))
    rolling_hash_kernel[(2,)](x, out, n, window, 0x100000001B3, BLOCK=32)
    yield Check("hashes", out, torch.tensor(want))


@triton.jit
def mandelbrot_kernel(out_ptr, width, height, limit, BH: tl.constexpr, BW: tl.constexpr):
    """A while loop over four tiles that ends when every lane has escaped."""
    y = tl.program_id(0) * BH + tl.arange(0, BH)[:, None]
    x = tl.program_id(1) * BW + tl.arange(0, BW)[None, :]
    c_re = x.to(tl.float32) * (3.0 / width) - 2.0 + tl.zeros((BH, BW), dtype=tl.float32)
    c_im = y.to(tl.float32) * (2.0 / height) - 1.0 + tl.zeros((BH, BW), dtype=tl.float32)
    re = tl.zeros((BH, BW), dtype=tl.float32)
    im = tl.zeros((BH, BW), dtype=tl.float32)
    count = tl.zeros((BH, BW), dtype=tl.int32)
    alive = count == 0
    step = 0
    while (step < limit) & (tl.sum(tl.sum(alive.to(tl.int32), axis=1), axis=0) > 0):
        new_re = re * re - im * im + c_re
        im = tl.where(alive, 2.0 * re * im + c_im, im)
        re = tl.where(alive, new_re, re)
        alive = alive & (re * re + im * im <= 4.0)
        count += alive.to(tl.int32)
        step += 1
    tl.store(out_ptr + y * width + x, count, mask=(y < height) & (x < width))


def mandelbrot(dtype: torch.dtype) -> Iterator[Check]:
    """Away from the set's edge, where rounding cannot change a count: at most a few pixels may differ."""
    width, height, limit = 24, 16, 12
    (out,) = guard(torch.zeros(height, width, dtype=torch.int32))
    mandelbrot_kernel[(2, 2)](out, width, height, limit, 8, 16)
    y, x = torch.meshgrid(torch.arange(height).double(), torch.arange(width).double(), indexing="ij")
    c = torch.complex(x * 3 / width - 2, y * 2 / height - 1)
    z, count, alive = torch.zeros_like(c), torch.zeros(height, width, dtype=torch.int32), torch.ones_like(c) != 0
    for _ in range(limit):
        z = torch.where(alive, z * z + c, z)
        alive = alive & (z.abs() <= 2)
        count += alive
    same = (out == count).float().mean()
    yield Check("share of equal counts", (same > 0.97)[None], torch.tensor([True]))
    assert len(count.unique()) > 6


@triton.jit
def collatz_kernel(x_ptr, steps_ptr, gcd_ptr, n, modulus, BLOCK: tl.constexpr):
    """Lanes finish at different times; then Euclid's algorithm, with % and swaps."""
    at = tl.arange(0, BLOCK)
    start = tl.load(x_ptr + at, mask=at < n, other=1)
    x = start
    steps = tl.zeros([BLOCK], dtype=tl.int16)
    while tl.max(x, axis=0) > 1:
        x = tl.where(x <= 1, x, tl.where(x % 2 == 0, x // 2, 3 * x + 1))
        steps += (x >= 1).to(tl.int16) * (tl.where(start == 1, 0, 1)).to(tl.int16)
        start = tl.where(x == 1, 1, start)
    tl.store(steps_ptr + at, steps, mask=at < n)
    a = tl.load(x_ptr + at, mask=at < n, other=1)
    b = tl.zeros_like(a) + modulus
    while tl.max(b, axis=0) > 0:
        rest = a % tl.where(b == 0, 1, b)
        a = tl.where(b == 0, a, b)
        b = tl.where(b == 0, 0, rest)
    tl.store(gcd_ptr + at, a, mask=at < n)


def collatz(dtype: torch.dtype) -> Iterator[Check]:
    def steps(value: int) -> int:
        count = 0
        while value > 1:
            value = value // 2 if value % 2 == 0 else 3 * value + 1
            count += 1
        return count

    n = 27
    x = torch.arange(1, n + 1, dtype=torch.int64)
    x, count, gcd = guard(x, torch.zeros(n, dtype=torch.int16), torch.zeros(n, dtype=torch.int64))
    collatz_kernel[(1,)](x, count, gcd, n, 360, BLOCK=32)
    yield Check("steps", count, torch.tensor([steps(v) for v in x.tolist()], dtype=torch.int16))
    yield Check("greatest common divisors", gcd, torch.gcd(x, torch.tensor(360)))


@triton.jit
def division_kernel(a_ptr, b_ptr, quotient_ptr, rest_ptr, logical_ptr, high_ptr, n, BLOCK: tl.constexpr):
    """Signed division truncates; a shift right is arithmetic on signed and logical on unsigned numbers."""
    at = tl.arange(0, BLOCK)
    a = tl.load(a_ptr + at, mask=at < n, other=0)
    b = tl.load(b_ptr + at, mask=at < n, other=1)
    tl.store(quotient_ptr + at, a // b, mask=at < n)
    tl.store(rest_ptr + at, a % b, mask=at < n)
    unsigned = a.to(tl.uint32, bitcast=True)
    divisor = b.to(tl.uint32, bitcast=True)
    mixed = (unsigned >> 5) ^ ((a >> 5).to(tl.uint32, bitcast=True)) ^ (unsigned // divisor) ^ (unsigned % divisor)
    tl.store(logical_ptr + at, mixed.to(tl.int32, bitcast=True), mask=at < n)
    tl.store(high_ptr + at, tl.umulhi(unsigned, divisor).to(tl.int32, bitcast=True), mask=at < n)


def division(dtype: torch.dtype) -> Iterator[Check]:
    n = 60
    a = torch.randint(-(2**31), 2**31, (n,), dtype=torch.int64).int()
    b = torch.cat([torch.tensor([1, -3, 3, 7, -(2**31), 2**31 - 1]), torch.randint(-99, -1, (n - 6,))]).int()
    a[:4] = torch.tensor([-(2**31), 7, -7, -(2**31)])
    a, b, *outs = guard(a, b, *(torch.zeros(n, dtype=torch.int32) for _ in range(4)))
    division_kernel[(1,)](a, b, *outs, n, BLOCK=64)
    yield Check("quotient", outs[0], torch.div(a.long(), b.long(), rounding_mode="trunc").int())
    yield Check("rest", outs[1], torch.fmod(a.long(), b.long()).int())
    ua, ub = a.numpy().view(np.uint32), b.numpy().view(np.uint32)
    mixed = (ua >> 5) ^ (a.numpy() >> 5).view(np.uint32) ^ (ua // ub) ^ (ua % ub)
    yield Check("unsigned", outs[2], torch.from_numpy(mixed.view(np.int32)))
    high = (ua.astype(np.uint64) * ub.astype(np.uint64)) >> np.uint64(32)
    yield Check("high half of the product", outs[3], torch.from_numpy(high.astype(np.uint32).view(np.int32)))


@triton.jit
def widths_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Integers of every width, cut, extended with and without sign, and put together again."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0)
    low = x.to(tl.int8)
    middle = (x >> 8).to(tl.uint8)
    high = (x >> 16).to(tl.int16)
    narrow = low * 3 + (low > 0).to(tl.int8)
    total = narrow.to(tl.int64) + middle.to(tl.int64) * 1000 + high.to(tl.int64) * 1000000
    total += (x != 0).to(tl.int64) << 40
    tl.store(out_ptr + at, total ^ -(x.to(tl.int64)), mask=at < n)


def widths(dtype: torch.dtype) -> Iterator[Check]:
    n = 50
    x = torch.randint(-(2**31), 2**31, (n,)).int()
    x[:5] = torch.tensor([0, -1, 127, 128, -(2**31)])
    x, out = guard(x, torch.zeros(n, dtype=torch.int64))
    widths_kernel[(1,)](x, out, n, BLOCK=64)
    low = x.to(torch.int8)
    narrow = low * 3 + (low > 0).to(torch.int8)
    total = narrow.long() + (x >> 8).to(torch.uint8).long() * 1000 + (x >> 16).to(torch.int16).long() * 1000000
    yield Check("sums", out, (total + ((x != 0).long() << 40)) ^ -x.long())


@triton.jit
def convert_kernel(x_ptr, out_ptr, back_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    y = x.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, y, mask=at < n)
    tl.store(back_ptr + at, y.to(x_ptr.dtype.element_ty), mask=at < n)


def conversions(dtype: torch.dtype) -> Iterator[Check]:
    """fp32 to a half type at every exponent, ties, subnormals and overflow; and every half-type bit pattern to fp32."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    middle = torch.randint(-(2**31), 2**31, (4096,)).int().view(torch.float32)
    ties = (every.float().view(torch.int32) + (1 << 15 if dtype is torch.bfloat16 else 1 << 12)).view(torch.float32)
    for x, kind in ((torch.cat([middle, ties, every.float()]), dtype), (every, torch.float32)):
        n = len(x)
        x, out, back = guard(x, torch.zeros(n, dtype=kind), torch.zeros(n, dtype=x.dtype))
        convert_kernel[(triton.cdiv(n, 256),)](x, out, back, n, BLOCK=256)
        number = ~x.isnan()
        want = x.to(kind)
        yield Check(
            "to",
            out[number].view(torch.int16 if kind is dtype else torch.int32),
            want[number].view(torch.int16 if kind is dtype else torch.int32),
        )
        yield Check("and back", back[number], want.to(x.dtype)[number], 0.0)
        yield Check("nan stays nan", out[~number].isnan(), torch.ones(int((~number).sum()), dtype=torch.bool))


@triton.jit
def nbody_kernel(x_ptr, m_ptr, a_ptr, n, eps, BLOCK: tl.constexpr, SOURCES: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < n
    x = tl.load(x_ptr + rows * 3, mask=inside, other=0.0)
    y = tl.load(x_ptr + rows * 3 + 1, mask=inside, other=0.0)
    z = tl.load(x_ptr + rows * 3 + 2, mask=inside, other=0.0)
    ax = tl.zeros([BLOCK], dtype=tl.float32)
    ay = tl.zeros([BLOCK], dtype=tl.float32)
    az = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, n, SOURCES):
        at = first + tl.arange(0, SOURCES)
        mass = tl.load(m_ptr + at, mask=at < n, other=0.0)
        dx = tl.load(x_ptr + at * 3, mask=at < n, other=0.0)[None, :] - x[:, None]
        dy = tl.load(x_ptr + at * 3 + 1, mask=at < n, other=0.0)[None, :] - y[:, None]
        dz = tl.load(x_ptr + at * 3 + 2, mask=at < n, other=0.0)[None, :] - z[:, None]
        r = tl.rsqrt(dx * dx + dy * dy + dz * dz + eps)
        pull = mass[None, :] * r * r * r
        ax += tl.sum(pull * dx, axis=1)
        ay += tl.sum(pull * dy, axis=1)
        az += tl.sum(pull * dz, axis=1)
    tl.store(a_ptr + rows * 3, ax, mask=inside)
    tl.store(a_ptr + rows * 3 + 1, ay, mask=inside)
    tl.store(a_ptr + rows * 3 + 2, az, mask=inside)


def nbody(dtype: torch.dtype) -> Iterator[Check]:
    n = 21
    x, m, a = guard(torch.randn(n, 3), torch.rand(n), torch.zeros(n, 3))
    nbody_kernel[(2,)](x, m, a, n, 0.01, 16, 8)
    d = (x[None] - x[:, None]).double()
    want = (m[None, :, None] * d / (d.square().sum(-1, keepdim=True) + 0.01) ** 1.5).sum(1)
    yield Check("accelerations", a, want.float(), 1e-4)


@triton.jit
def rope_kernel(x_ptr, position_ptr, out_ptr, heads, base_log2, HALF: tl.constexpr):
    """Rotates pairs of neighbours: split, rotate, join."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    at = (row * heads + head) * (2 * HALF) + tl.arange(0, 2 * HALF)
    x = tl.load(x_ptr + at).to(tl.float32)
    re, im = tl.split(tl.reshape(x, (HALF, 2)))
    pair = tl.arange(0, HALF).to(tl.float32)
    angle = tl.load(position_ptr + row).to(tl.float32) * tl.exp2(-pair * (base_log2 / HALF))
    c, s = tl.cos(angle), tl.sin(angle)
    both = tl.join(re * c - im * s, re * s + im * c)
    tl.store(out_ptr + at, tl.reshape(both, (2 * HALF,)))


def rope(dtype: torch.dtype) -> Iterator[Check]:
    rows, heads, half = 4, 3, 8
    x = torch.randn(rows, heads, 2 * half).to(dtype)
    x, position, out = guard(x, torch.tensor([0, 1, 77, 1000]), torch.zeros(x.shape, dtype=dtype))
    rope_kernel[(rows, heads)](x, position, out, heads, 10.0, half)
    angle = position[:, None] * torch.exp2(-torch.arange(half).double() * 10 / half)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    pairs = torch.view_as_complex(x.double().unflatten(-1, (half, 2)))
    want = torch.view_as_real(pairs * turn).flatten(-2)
    yield Check("rotated", out, want.to(dtype), max(1e-4, EPSILON[dtype]))


@triton.jit
def adam_kernel(p_ptr, g_ptr, m_ptr, v_ptr, n, lr, beta1, beta2, eps, step, BLOCK: tl.constexpr):
    """Three tensors updated in place; parameters may be of a half type."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    g = tl.load(g_ptr + at, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(m_ptr + at, mask=mask, other=0.0)
    v = tl.load(v_ptr + at, mask=mask, other=0.0)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    tl.store(m_ptr + at, m, mask=mask)
    tl.store(v_ptr + at, v, mask=mask)
    fix1 = 1 - tl.exp2(step * tl.log2(beta1))
    fix2 = 1 - tl.exp2(step * tl.log2(beta2))
    change = lr * (m / fix1) / (tl.sqrt(v / fix2) + eps)
    p = tl.load(p_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_ptr + at, (p - change).to(p_ptr.dtype.element_ty), mask=mask)


def adam(dtype: torch.dtype) -> Iterator[Check]:
    n = 75
    p, g = guard(torch.randn(n).to(dtype), torch.randn(n).to(dtype))
    m, v = guard(torch.randn(n) * 0.1, torch.rand(n))
    old = [t.double() for t in (p, g, m, v)]
    adam_kernel[(3,)](p, g, m, v, n, 0.1, 0.9, 0.99, 1e-8, 3.0, BLOCK=32)
    want_m, want_v = 0.9 * old[2] + 0.1 * old[1], 0.99 * old[3] + 0.01 * old[1] ** 2
    yield Check("m", m, want_m.float())
    yield Check("v", v, want_v.float())
    change = 0.1 * (want_m / (1 - 0.9**3)) / ((want_v / (1 - 0.99**3)).sqrt() + 1e-8)
    yield Check("p", p, (old[0] - change).to(dtype), max(1e-4, EPSILON[dtype]))


@triton.jit
def functions_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """GELU by erf, softplus and a logistic in one row each."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476)), mask=at < n)
    soft = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    tl.store(out_ptr + n + at, soft, mask=at < n)
    tl.store(out_ptr + 2 * n + at, tl.sigmoid(x), mask=at < n)
    tl.store(out_ptr + 3 * n + at, tl.ceil(x) - tl.floor(x) + tl.fma(x, x, -1.0), mask=at < n)


def functions(dtype: torch.dtype) -> Iterator[Check]:
    n = 60
    x, out = guard(torch.linspace(-20, 20, n), torch.zeros(4, n))
    functions_kernel[(1,)](x, out, n, BLOCK=64)
    d = x.double()
    want = [0.5 * d * (1 + torch.erf(d * 0.7071067811865476)), torch.nn.functional.softplus(d), d.sigmoid()]
    want.append(d.ceil() - d.floor() + d * d - 1)
    yield Check("functions", out, torch.stack(want).float())


@triton.jit
def random_kernel(out_ptr, words_ptr, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(words_ptr + at, tl.randint(seed, at))
    tl.store(out_ptr + at, tl.randn(seed, at))


def random_numbers(dtype: torch.dtype) -> Iterator[Check]:
    n = 2048
    for seed in (7, 2**33 + 1):
        out, words = guard(torch.zeros(n), torch.zeros(n, dtype=torch.int32))
        random_kernel[(4,)](out, words, seed, BLOCK=n // 4)
        yield Check("philox words", words, bits(seed, torch.arange(n)).int())
        yield Check("moments", torch.stack([out.mean(), out.std()]), torch.tensor([0.0, 1.0]), 0.08)


CASES = (
    Case(int4_round_trip),
    Case(rolling_hash),
    Case(mandelbrot),
    Case(collatz),
    Case(division),
    Case(widths),
    Case(conversions, (torch.float16, torch.bfloat16)),
    Case(nbody),
    Case(rope, FLOATS),
    Case(adam, FLOATS),
    Case(functions),
    Case(random_numbers),
)
