"""Functions of libdevice are right on the CPU, or refused by name."""

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from lychee.backends.cpu import activated

EDGES = [0.0, -0.0, 1e-40, -1e-40, 1e-10, 0.5, -0.5, 1.5, 2.5, -2.5, 30.0, -30.0, 88.0, 1e30, -1e30]
INF, NAN = float("inf"), float("nan")
NAMES = ["log1p", "expm1", "tanh", "sinh", "cosh", "trunc", "rint", "isnan", "isinf", "finitef", "exp", "exp2", "sin"]
NAMES += ["cos", "sqrt", "rsqrt", "erf", "floor", "ceil", "abs"]
TORCH = {"rint": torch.round, "isnan": torch.isnan, "isinf": torch.isinf, "finitef": torch.isfinite}


@triton.jit
def apply_kernel(x_ptr, y_ptr, n, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n)
    tl.store(y_ptr + offs, FUNCTION(x), mask=offs < n)


@triton.jit
def through_the_module_kernel(x_ptr, y_ptr):
    tl.store(y_ptr, libdevice.tanh(tl.load(x_ptr)))


@triton.jit
def not_there_kernel(x_ptr, y_ptr):
    tl.store(y_ptr, libdevice.cyl_bessel_i0(tl.load(x_ptr)))


@pytest.mark.parametrize("name", NAMES)
def test_function_is_torchs(name):
    from lychee.backends.cpu import libdevice as ours

    x = torch.cat([torch.tensor([*EDGES, INF, -INF, NAN]), torch.randn(4000) * 4, torch.randn(1000) * 1e-3])
    y = torch.empty_like(x)
    with activated():
        apply_kernel[(triton.cdiv(len(x), 64),)](x, y, len(x), getattr(ours, name), BLOCK=64)
    expected = TORCH.get(name, getattr(torch, name, None))(x.double()).float()
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-44, equal_nan=True)
    assert torch.equal(torch.signbit(y)[y == 0], torch.signbit(expected)[y == 0])


def test_a_kernel_that_uses_libdevice_runs():
    y = torch.zeros(1)
    with activated():
        through_the_module_kernel[(1,)](torch.tensor([0.5]), y)
    assert y.item() == pytest.approx(torch.tensor(0.5).tanh().item(), rel=1e-6)


def test_a_function_that_is_not_there_is_refused_by_name():
    with activated(), pytest.raises(Exception, match=r"libdevice.cyl_bessel_i0 is not available on the CPU"):
        not_there_kernel[(1,)](torch.tensor([0.5]), torch.zeros(1))
