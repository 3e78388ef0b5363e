"""What the backend does not compile is refused by name, with the kernel's line and a way out."""

import pytest
import torch
import triton
import triton.language as tl

from lychee.backends.cpu import activated
from lychee.backends.cpu.errors import UnsupportedError


@triton.jit
def batched_kernel(p, B: tl.constexpr):
    i = tl.arange(0, B)
    at = i[:, None, None] * B * B + i[None, :, None] * B + i[None, None, :]
    x = tl.load(p + at)
    tl.store(p + at, tl.dot(x, x))


@triton.jit
def assembly_kernel(p, B: tl.constexpr):
    i = tl.arange(0, B)
    x = tl.load(p + i)
    y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(p + i, y)


@triton.jit
def printing_kernel(p, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.device_print("x", tl.load(p + i))


@triton.jit
def half_atomic_kernel(p, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.atomic_add(p + i, tl.full((B,), 1.0, tl.float16))


@triton.jit
def _greatest_divisor(a, b):
    while b > 0:
        a, b = b, a % b
    return a


@triton.jit
def looping_combine_kernel(p, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(p, tl.reduce(tl.load(p + i), 0, _greatest_divisor))


@triton.jit
def large_kernel(p, q, B: tl.constexpr):
    at = tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :]
    x, y = tl.load(p + at), tl.load(q + at)
    tl.store(p + at, tl.trans(y))
    tl.store(q + at, tl.trans(x))


def line(kernel, offset):
    return rf"{__file__}:{kernel.fn.__code__.co_firstlineno + offset}: "


CASES = [
    (batched_kernel, torch.zeros(16, 16, 16), 16, 5, r"tt\.dot is not supported on the CPU: .*loop over the batch"),
    (assembly_kernel, torch.zeros(16), 16, 4, r"tt\.elementwise_inline_asm is not supported on the CPU: "),
    (printing_kernel, torch.zeros(16), 16, 3, r"tt\.print is not supported on the CPU: "),
    (half_atomic_kernel, torch.zeros(16).half(), 16, 3, r"tt\.atomic_rmw is not supported .*use fp32 or an integer"),
    (
        looping_combine_kernel,
        torch.zeros(16).int(),
        16,
        3,
        r"scf\.while is not supported .*straight-line .*use tl\.where",
    ),
]


@pytest.mark.parametrize(
    ("kernel", "x", "size", "offset", "message"), CASES, ids=lambda case: getattr(case, "__name__", "")
)
def test_refusals_name_the_op_the_line_and_a_way_out(kernel, x, size, offset, message):
    with activated(), pytest.raises(UnsupportedError, match=line(kernel, offset) + message):
        kernel[(1,)](x, B=size)


def test_tiles_that_fit_no_stack_are_refused():
    with (
        activated(),
        pytest.raises(UnsupportedError, match="need more than 4 MiB per program: use smaller block sizes"),
    ):
        large_kernel[(1,)](torch.zeros(1024, 1024), torch.zeros(1024, 1024), B=1024)


@triton.jit
def fp8_kernel(p, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(p + i, tl.load(p + i).to(tl.float8e5).to(tl.float32))


def test_fp8_is_refused_by_triton_itself():
    with activated(), pytest.raises(triton.CompilationError, match="fp8e5 not supported in this architecture"):
        fp8_kernel[(1,)](torch.zeros(16), B=16)


def test_a_refusal_leaves_the_kernel_usable():
    for _ in range(2):
        with activated(), pytest.raises(UnsupportedError):
            printing_kernel[(1,)](torch.zeros(16), B=16)


@triton.jit
def stepping_kernel(y, n, step):
    total = 0
    for i in range(0, n, step):
        total += i + 1
    tl.store(y, total)


@pytest.mark.parametrize(("step", "total"), [(2, 9), (5, 1), (-1, 0), (0, 0)])
def test_a_loop_whose_step_is_not_positive_makes_no_trip(step, total):
    y = torch.zeros(1, dtype=torch.int32)
    with activated():
        stepping_kernel[(1,)](y, 5, step)
    assert y.item() == total
