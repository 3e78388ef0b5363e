"""The vector functions: how far from the truth, at the edges, and the same bits whatever the vector and the CPU."""

import ctypes
import math
import platform
from functools import cache

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch

from lychee.backends.cpu import target
from lychee.backends.cpu.vecmath import NAMES, definition

HOST = target.host()
CPUS = {"host": (HOST.cpu, HOST.features)}
if platform.machine() == "x86_64":
    CPUS["sse"] = ("x86-64", "")
    if HOST.lanes > 4:
        CPUS["avx2"] = ("haswell", "")
TYPES = {"f32": ("float", np.float32), "f64": ("double", np.float64)}
TINY, HUGE = 2.0**-149, float(np.finfo(np.float32).max)
# the largest errors over all fp32 values, in units of the last place, rounded up
WORST = dict(exp=0.9, exp2=0.9, log=0.95, log2=1.0, log1p=1.3, sin=1.6, cos=1.6, erf=1.3, tanh=1.45, rsqrt=1.5)  # noqa: C408

llvm.initialize_native_target()
llvm.initialize_native_asmprinter()


@cache
def compiled(name, lanes, elem="f32", cpu="host", avx512=False):
    """A function of an array whose length is a multiple of the lanes."""
    scalar, dtype = TYPES[elem]
    vector = scalar if lanes == 1 else f"<{lanes} x {scalar}>"
    function = definition(name, lanes, elem, avx512)
    text = "\n".join(
        [
            *function.declares,
            function.text,
            "define void @run(ptr %x, ptr %y, i64 %n) {",
            "entry:\n  br label %loop\nloop:\n  %i = phi i64 [0, %entry], [%next, %loop]",
            f"  %from = getelementptr {scalar}, ptr %x, i64 %i\n  %to = getelementptr {scalar}, ptr %y, i64 %i",
            f"  %a = load {vector}, ptr %from, align 4\n  %b = call {vector} {function.symbol}({vector} %a)",
            f"  store {vector} %b, ptr %to, align 4\n  %next = add i64 %i, {lanes}",
            "  %more = icmp ult i64 %next, %n\n  br i1 %more, label %loop, label %done\ndone:\n  ret void\n}",
        ]
    )
    module = llvm.parse_assembly(text)
    module.verify()
    name, features = CPUS[cpu]
    machine = llvm.Target.from_default_triple().create_target_machine(cpu=name, features=features, opt=2)
    passes = llvm.create_pass_builder(machine, llvm.PipelineTuningOptions(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    native = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(
        engine.get_function_address("run")
    )

    def run(x, engine=engine):  # the engine owns the code
        x = np.ascontiguousarray(x, dtype)
        assert x.size % lanes == 0
        y = np.empty_like(x)
        native(x.ctypes.data, y.ctypes.data, x.size)
        return y

    return run


def at(name, *values):
    """fp32 results of single values, as Python floats."""
    return [float(y) for y in compiled(name, 1)(values)]


def samples(count):
    """fp32 values of both signs, all exponents, denormals, infinities and NaN among them."""
    step = 2**32 // count
    bits = np.arange(count, dtype=np.uint64) * step + np.random.default_rng(0).integers(0, step, count, np.uint64)
    return bits.astype(np.uint32).view(np.float32)


def dense(name, count):
    """fp32 values where the function is neither constant nor linear."""
    low, high = {"exp": (-104, 89), "exp2": (-150, 128), "log1p": (-1, 8), "tanh": (-10, 10), "erf": (-4, 4)}.get(
        name, (0, 8)
    )
    return np.random.default_rng(1).uniform(low, high, count).astype(np.float32)


def truth(name, x):
    """fp64 results."""
    if name == "rsqrt":
        return 1 / np.sqrt(x)
    return getattr(torch, name)(torch.from_numpy(x)).numpy() if name == "erf" else getattr(np, name)(x)


def ulps(y, expected):
    """Distances in units of fp32's last place at the expected fp64 values; inf where just one is NaN or infinite."""
    rounded = expected.astype(np.float32)
    size = np.abs(np.where(np.isfinite(expected), expected, 1.0))
    unit = np.exp2(np.clip(np.floor(np.log2(np.maximum(size, TINY))), -126, 127) - 23)
    apart = np.abs(y.astype(np.float64) - expected) / unit
    apart = np.where((y == rounded) & ~np.isfinite(rounded) | np.isnan(y) & np.isnan(rounded), 0.0, apart)
    return np.where(np.isnan(apart), np.inf, apart)


@pytest.mark.parametrize("name", NAMES)
def test_error_stays_below_its_bound(name):
    with np.errstate(all="ignore"):
        for x in (samples(1 << 20), dense(name, 1 << 19)):
            y, expected = compiled(name, HOST.lanes)(x), truth(name, x.astype(np.float64))
            apart = ulps(y, expected)
            worst = int(apart.argmax())
            assert apart[worst] <= WORST[name], f"{name}({x[worst]!r}) = {y[worst]!r}, not {expected[worst]!r}"


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("name", NAMES)
def test_bits_depend_on_neither_the_width_nor_the_cpu(name, cpu):
    x = np.concatenate([samples(1 << 15), dense(name, 1 << 15)])
    expected = compiled(name, 1)(x)
    for lanes in (1, 4, 8, 16):
        y = compiled(name, lanes, cpu=cpu)(x)
        assert np.array_equal(np.isnan(y), np.isnan(expected))
        known = ~np.isnan(expected)
        assert np.array_equal(y.view(np.uint32)[known], expected.view(np.uint32)[known])


@pytest.mark.skipif(HOST.lanes < 16, reason="this CPU has no AVX-512")
@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("name", ["exp", "exp2"])
def test_bits_are_the_same_by_the_instructions_of_avx512(name, lanes):
    x = np.concatenate([samples(1 << 18), dense(name, 1 << 18)])
    y, expected = compiled(name, lanes, avx512=True)(x), compiled(name, lanes)(x)
    assert "scalef" in definition(name, lanes, avx512=True).text
    assert np.array_equal(y, expected, equal_nan=True)


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_huge_angles_leave_the_lanes_beside_them_alone(name):
    x = np.array([1e-3, 1e30, 2.0, -3e38, math.inf, 1e5, 7.0, math.nan], np.float32)
    y = compiled(name, 8)(x)
    expected = np.array(at(name, *x), np.float32)
    assert np.array_equal(y, expected, equal_nan=True)
    for lane in (1, 3):
        assert abs(y[lane] - getattr(math, name)(float(x[lane]))) < 1e-7


@pytest.mark.parametrize("name", NAMES)
def test_nan_stays_nan(name):
    assert math.isnan(at(name, math.nan)[0])


@pytest.mark.parametrize("name", ["log1p", "sin", "erf", "tanh"])
def test_odd_at_zero(name):
    positive, negative, tiny, minus_tiny = at(name, 0.0, -0.0, TINY, -TINY)
    assert math.copysign(1, positive) == 1
    assert math.copysign(1, negative) == -1
    assert (positive, negative) == (0, 0)
    if name != "erf":
        assert (tiny, minus_tiny) == (TINY, -TINY)


@pytest.mark.parametrize("name", ["exp", "exp2", "cos"])
def test_one_at_zero(name):
    assert at(name, 0.0, -0.0, TINY, -TINY) == [1, 1, 1, 1]


def test_exp_overflows_to_infinity_and_underflows_through_denormals():
    assert at("exp", 88.8, HUGE, math.inf) == [math.inf] * 3
    assert at("exp", -104.1, -HUGE, -math.inf) == [0, 0, 0]
    assert math.isfinite(at("exp", 88.72)[0])
    assert at("exp", -103.5, -103.0) == [TINY, TINY]


def test_exp2_of_an_integer_is_exact():
    x = np.arange(-149, 128)
    assert at("exp2", *x) == [2.0 ** int(n) for n in x]
    assert at("exp2", 128, HUGE, math.inf) == [math.inf] * 3
    assert at("exp2", -150.1, -HUGE, -math.inf) == [0, 0, 0]


def test_log2_of_a_power_of_two_is_exact():
    x = range(-149, 128)
    assert at("log2", *(2.0**n for n in x)) == list(x)


@pytest.mark.parametrize(("name", "pole"), [("log", 0.0), ("log2", 0.0), ("log1p", -1.0)])
def test_logarithms_beyond_their_domain(name, pole):
    assert at(name, pole, math.inf) == [-math.inf, math.inf]
    below = at(name, np.nextafter(np.float32(pole), np.float32(-2)), -2.0, -HUGE, -math.inf)
    assert all(map(math.isnan, below))
    assert at(name, pole + 1) == [0]


def test_log_of_minus_zero_is_minus_infinity():
    assert at("log", -0.0) == at("log2", -0.0) == [-math.inf]


@pytest.mark.parametrize("name", ["erf", "tanh"])
def test_saturates_at_one(name):
    assert at(name, 9.1, HUGE, math.inf) == [1, 1, 1]
    assert at(name, -9.1, -HUGE, -math.inf) == [-1, -1, -1]


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_infinite_angles_have_no_sine(name):
    assert all(map(math.isnan, at(name, math.inf, -math.inf)))


def test_rsqrt_is_two_ieee_operations():
    x = np.abs(samples(1 << 12))
    with np.errstate(all="ignore"):
        expected = np.float32(1) / np.sqrt(x)
    assert np.array_equal(compiled("rsqrt", 4)(x), expected, equal_nan=True)


@pytest.mark.parametrize("lanes", [1, 2, 8])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "rsqrt"])
def test_fp64_is_libm_lane_by_lane(name, lanes):
    x = np.random.default_rng(2).uniform(0.1, 50, 64)
    function = getattr(math, name, np.exp2)  # Python 3.10 has no math.exp2
    assert np.allclose(compiled(name, lanes, "f64")(x), [function(v) for v in x], rtol=4e-16, atol=0)


@pytest.mark.parametrize("lanes", [1, 4])
def test_fp64_rsqrt(lanes):
    x = np.random.default_rng(2).uniform(0.1, 50, 64)
    assert np.array_equal(compiled("rsqrt", lanes, "f64")(x), 1 / np.sqrt(x))


@pytest.mark.parametrize("name", NAMES)
def test_text_is_short_enough_to_inline_everywhere(name):
    instructions = [line for line in definition(name, 8).text.splitlines() if " = " in line]
    assert len(instructions) < (40 if name in ("exp", "exp2", "log", "log2", "rsqrt") else 60)
