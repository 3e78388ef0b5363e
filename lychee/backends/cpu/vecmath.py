"""Elementary functions over vectors, as LLVM IR text.

Every fp32 function is written once, for vectors of any number of lanes; one lane is a plain scalar. Only operations
that IEEE 754 defines to the bit are used (fused multiply-add among them, and no fast-math flag), so a result depends on
its operand alone: never on the lanes beside it, the vector's width or the CPU. Denormals are neither read nor written
as zero. fp64 functions call libm lane by lane.

Polynomials are minimax fits whose coefficients were rounded to fp32 one by one, lowest power first, the others fitted
again after each; the comment beside one gives its interval and the error that rounding left. Coefficients run from the
highest power to the lowest, as Horner's rule reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from lychee.backends.cpu.vecwriter import SIGN, Writer

_ROUND = float(3 << 22)  # added to |v| < 2^22, it leaves the integer nearest to v in the low bits of the sum
_EXPONENT = -1 << 23  # the bits of an exponent and a sign
_ROOT_HALF = 0x3F3504F3  # the bits of sqrt(1/2)
_THREE_QUARTERS = 0x3F400000  # the bits of 3/4

# ln 2 and pi/2 as sums of fp32 values; a multiple of pi/2 below 1e5 needs the third
_LN2 = (0.693147182, -1.90465421e-09)
_HALF_PI = (1.57079637, -4.37113883e-08, -1.71512451e-15)

# exp(r), |r| <= ln(2)/2: relative error 2^-28.3
_EXP = (0.00138214685, 0.00836866256, 0.0416682549, 0.166665211, 0.49999994, 1.0, 1.0)
# 2^r, |r| <= 1/2: relative error 2^-28.3
_EXP2 = (0.000153264715, 0.00133908063, 0.00961850584, 0.0555035993, 0.240226477, 0.693147182, 1.0)
# (log(1 + f) - f) / f^2, -1/4 <= f <= 1/2: error relative to the logarithm 2^-27.6
_LOG = (
    *(-0.0451522842, 0.104725517, -0.131639361, 0.1447763, -0.166468784),
    *(0.19990848, -0.250001103, 0.333334506, -0.5),
)
# log2(1 + f) / f - 1, sqrt(1/2) <= 1 + f <= sqrt(2): error relative to the logarithm 2^-27.0
_LOG2 = (
    *(-0.116394483, 0.186865315, -0.188254431, 0.204156771, -0.239952147),
    *(0.288618803, -0.360682577, 0.480896503, -0.721347511, 0.442695051),
)
# (sin(r) / r - 1) / r^2 in r^2, |r| <= 0.789: error relative to the sine 2^-27.8
_SIN = (-0.000195078828, 0.00833210628, -0.166666538)
# cos(r) in r^2, |r| <= 0.789: relative error 2^-32.8
_COS = (2.44314142e-05, -0.00138873048, 0.0416666456, -0.5, 1.0)
# (tanh(r) / r - 1) / r^2 in r^2, |r| <= 0.6: error relative to the hyperbolic tangent 2^-28.4
_TANH = (-0.00589796668, 0.0207986254, -0.0537847169, 0.133319363, -0.333332986)
# erf(r) / r - 1 in r^2, |r| <= 0.8: error relative to erf(r) 2^-28.1
_ERF = (-0.000654224947, 0.00508686574, -0.0268222429, 0.112831622, -0.376126081, 0.128379166)
# log(1 - erf(r)) / r, 0.8 <= r <= 4: absolute error left in erf(r) 2^-28.1
_ERFC = (0.000215942797, -0.00323104323, 0.0229413565, -0.105341636, -0.635658085, -1.12853205)


@dataclass(frozen=True)
class Definition:
    """`text` defines `symbol` and what it calls; `declares` are lines that its module needs once."""

    symbol: str
    text: str
    declares: tuple[str, ...]


def _times_power(w: Writer, p: str, n: str, biased: str) -> str:
    """p * 2^n for -150 <= n <= 128, with n + 254 in the low nine bits of `biased`.

    2^n may be no normal number, so it is split into two that are. The first product is exact; the second rounds once,
    to a denormal, zero or infinity where that is due. AVX-512 has an instruction that does it all.
    """
    if w.avx512 and w.lanes in (4, 8, 16):
        return w.scalef(p, n)
    both = w.integer("shl", biased, 23)
    first = w.integer("and", w.integer("lshr", both, 1), _EXPONENT)
    second = w.integer("sub", both, first)
    return w.mul(w.mul(p, w.from_bits(first)), w.from_bits(second))


def _exp(w: Writer, x: str) -> str:
    # exp(x) = 2^n exp(r), r = x - n ln 2
    bias = _ROUND + 254
    x = w.at_least(w.at_most(x, 89.0), -104.0)  # inf from 88.73 on, 0 below -103.98
    shifted = w.fma(x, math.log2(math.e), bias)
    n = w.sub(shifted, bias)
    r = w.fma(n, -_LN2[1], w.fma(n, -_LN2[0], x))
    return _times_power(w, w.horner(r, _EXP), n, w.bits(shifted))


def _exp2(w: Writer, x: str) -> str:
    bias = _ROUND + 254
    x = w.at_least(w.at_most(x, 128.0), -150.0)
    shifted = w.add(x, bias)
    n = w.sub(shifted, bias)
    return _times_power(w, w.horner(w.sub(x, n), _EXP2), n, w.bits(shifted))


def _split(w: Writer, x: str, least: int) -> tuple[str, str]:
    """(k, f) such that x = 2^k (1 + f), for x > 0; k is a float, f is exact, `least` the bits of the least 1 + f."""
    denormal = w.compare(x, "olt", 2.0**-126)
    above = w.integer("sub", w.bits(w.mul(x, w.select(denormal, 2.0**24, 1.0))), least)
    k = w.add(w.to_float(w.integer("ashr", above, 23)), w.select(denormal, -24.0, 0.0))
    mantissa = w.integer("add", w.integer("and", above, ~_EXPONENT), least)
    return k, w.sub(w.from_bits(mantissa), 1.0)


def _beyond(w: Writer, x: str, result: str) -> str:
    """A logarithm's result for every x: -inf at 0, NaN below it, x itself at inf and NaN."""
    result = w.select(w.compare(x, "olt", math.inf), result, x)
    pole = w.select(w.compare(x, "oeq", 0.0), -math.inf, math.nan)
    return w.select(w.compare(x, "ogt", 0.0), result, pole)


def _natural(w: Writer, k: str, f: str) -> str:
    """log(2^k (1 + f)); f where k and f are tiny."""
    series = w.mul(f, w.horner(f, _LOG))
    return w.fma(k, _LN2[0], w.fma(series, f, f))


def _log(w: Writer, x: str) -> str:
    return _beyond(w, x, _natural(w, *_split(w, x, _THREE_QUARTERS)))


def _log2(w: Writer, x: str) -> str:
    k, f = _split(w, x, _ROOT_HALF)  # the sum of k and the rest never cancels to less than 1/2
    return _beyond(w, x, w.add(k, w.fma(w.horner(f, _LOG2), f, f)))


def _log1p(w: Writer, x: str) -> str:
    # 1 + x = 2^k (1 + f): k from the rounded sum, but f = x / 2^k + (1 / 2^k - 1) keeps the bits of x that the sum
    # lost. 4 / 2^k stands for 1 / 2^k, which is no normal number at k = 128.
    total = w.add(x, 1.0)
    above = w.integer("sub", w.bits(total), _THREE_QUARTERS)
    k = w.to_float(w.integer("ashr", above, 23))
    scale = w.from_bits(w.integer("sub", 129 << 23, w.integer("and", above, _EXPONENT)))
    f = w.fma(w.mul(x, scale), 0.25, w.fma(scale, 0.25, -1.0))
    result = _beyond(w, total, _natural(w, k, f))
    return w.select(w.compare(x, "oeq", 0.0), x, result)  # -0


def _odd(w: Writer, x: str, coefficients: Sequence[float]) -> tuple[str, str]:
    """(x + x^3 p(x^2), x^2)."""
    square = w.mul(x, x)
    return w.fma(w.mul(x, square), w.horner(square, coefficients), x), square


def _wave(w: Writer, x: str, name: str, turns: int) -> str:
    """sin(|x| + turns pi/2), with the sign of x if turns is 0; libm's `name` where |x| > 1e5.

    |x| = n pi/2 + r: the first step to r is exact, the other two lose half a unit of its last place each. The low two
    bits of n + turns choose among sin r, cos r, -sin r and -cos r.
    """
    magnitude, sign_of_x = w.magnitude(x)
    bias = _ROUND + turns
    shifted = w.fma(magnitude, 2 / math.pi, bias)
    n = w.sub(shifted, bias)
    r = magnitude
    for part in _HALF_PI:
        r = w.fma(n, -part, r)
    sine, square = _odd(w, r, _SIN)
    cosine = w.horner(square, _COS)
    quarter = w.bits(shifted)
    value = w.select(w.test(quarter, 1), cosine, sine)
    sign = w.integer("and", w.integer("shl", quarter, 30), SIGN)
    if turns == 0:
        sign = w.integer("xor", sign, sign_of_x)
    return w.patch(w.compare(magnitude, "ogt", 1e5), w.negate(value, sign), name, x)


def _sin(w: Writer, x: str) -> str:
    return _wave(w, x, "sin", turns=0)


def _cos(w: Writer, x: str) -> str:
    return _wave(w, x, "cos", turns=1)


def _narrow_exp(w: Writer, x: str) -> str:
    """exp(x) for |x| <= 30 where a relative error of x times 2^-28 does no harm."""
    bias = _ROUND + 127
    shifted = w.fma(x, math.log2(math.e), bias)
    r = w.fma(w.sub(shifted, bias), -_LN2[0], x)
    return w.mul(w.horner(r, _EXP), w.from_bits(w.integer("shl", w.bits(shifted), 23)))


def _tanh(w: Writer, x: str) -> str:
    magnitude, sign = w.magnitude(x)
    a = w.at_most(magnitude, 10.0)  # 1 from 9.02 on
    near, _ = _odd(w, a, _TANH)
    far = w.sub(1.0, w.div(2.0, w.add(_narrow_exp(w, w.add(a, a)), 1.0)))
    return w.negate(w.select(w.compare(a, "olt", 0.6), near, far), sign)


def _erf(w: Writer, x: str) -> str:
    magnitude, sign = w.magnitude(x)
    a = w.at_most(magnitude, 4.0)  # 1 from 3.92 on
    near = w.fma(w.horner(w.mul(a, a), _ERF), a, a)
    far = w.sub(1.0, _narrow_exp(w, w.mul(a, w.horner(a, _ERFC))))
    return w.negate(w.select(w.compare(a, "olt", 0.8), near, far), sign)


def _rsqrt(w: Writer, x: str) -> str:
    return w.div(1.0, w.sqrt(x))


_FP32: dict[str, Callable[[Writer, str], str]] = {
    "exp": _exp,
    "exp2": _exp2,
    "log": _log,
    "log2": _log2,
    "log1p": _log1p,
    "sin": _sin,
    "cos": _cos,
    "erf": _erf,
    "tanh": _tanh,
    "rsqrt": _rsqrt,
}
NAMES = tuple(_FP32)


@cache
def definition(name: str, lanes: int, elem: str = "f32", avx512: bool = False) -> Definition:
    """The function `name` (one of NAMES) of `lanes` values of `elem`, f32 or f64; one lane is a scalar.

    `avx512` allows the instructions of AVX-512 F and VL; the bits of the results are the same without.
    """
    w = Writer(lanes, elem, avx512)
    if elem == "f32" or name == "rsqrt":
        result = _FP32[name](w, "%x")
    else:
        result = w.libm(name, "%x")
    symbol = f"@lychee.{name}.{elem}x{lanes}"
    lines = ["entry:", *w.lines, f"ret {w.vector} {result}"]
    body = "\n".join(line if line.endswith(":") else f"  {line}" for line in lines)
    text = f"define internal {w.vector} {symbol}({w.vector} %x) alwaysinline nounwind {{\n{body}\n}}\n"
    return Definition(symbol, "".join([*w.callees, text]), tuple(w.declares))
