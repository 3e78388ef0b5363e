"""What kernels know as `triton.language.extra.libdevice`, as far as Triton itself can say it: to a few ulp."""

import triton
import triton.language as tl

exp, exp2, log, log2, sin, cos = tl.exp, tl.exp2, tl.log, tl.log2, tl.sin, tl.cos
sqrt, rsqrt, erf, fma = tl.sqrt, tl.rsqrt, tl.erf, tl.fma
floor, ceil, abs, fabs, sqrt_rn, div_rn = tl.floor, tl.ceil, tl.abs, tl.abs, tl.sqrt_rn, tl.div_rn


def __getattr__(name: str) -> None:
    raise AttributeError(f"libdevice.{name} is not available on the CPU: write it with what triton.language has")


@triton.jit
def log1p(x):
    """Kahan's correction of log(1 + x) for the rounding of 1 + x."""
    w = 1 + x
    return tl.where(w == 1, x, tl.where(w == float("inf"), w, tl.log(w) * (x / (w - 1))))


@triton.jit
def expm1(x):
    """Kahan's correction of exp(x) - 1 for the rounding of exp(x)."""
    w = tl.exp(x)
    tiny, large = w == 1, (w == 0) | (w == float("inf"))
    return tl.where(tiny, x, tl.where(large, w - 1, (w - 1) * (x / tl.log(w))))


@triton.jit
def tanh(x):
    size = expm1(2 * tl.minimum(tl.abs(x), 30.0))
    size = tl.where(x != x, x, size / (size + 2))
    return tl.where(x == 0, x, tl.where(x < 0, -size, size))


@triton.jit
def sinh(x):
    size = expm1(tl.abs(x))
    size = tl.where(size == float("inf"), size, 0.5 * (size + size / (size + 1)))
    return tl.where(x == 0, x, tl.where(x < 0, -size, size))


@triton.jit
def cosh(x):
    size = tl.exp(tl.abs(x))
    return 0.5 * size + 0.5 / size


@triton.jit
def trunc(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def rint(x):
    """The nearest integer, ties to even."""
    low = tl.floor(x)
    rest = x - low
    odd = low * 0.5 != tl.floor(low * 0.5)
    nearest = tl.where((rest > 0.5) | ((rest == 0.5) & odd), low + 1, low)
    return tl.where(nearest == 0, 0 * x, nearest)  # a zero of the sign of x


@triton.jit
def isnan(x):
    return (x != x).to(tl.int32)


@triton.jit
def isinf(x):
    return (tl.abs(x) == float("inf")).to(tl.int32)


@triton.jit
def finitef(x):
    return (tl.abs(x) < float("inf")).to(tl.int32)
