"""`@kernel`: a launch on CPU tensors takes the short way and runs just what Triton would have run."""

import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from lychee.backends.cpu import activated
from lychee.kernels import kernel as module
from lychee.kernels.kernel import kernel
from tests.kernels.add_kernel import add_kernel

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels do not compile", allow_module_level=True)

SEVEN = tl.constexpr(7)


def parts(out_ptr, x_ptr, n, CONST: tl.constexpr = 3):
    """Tells apart what Triton specialises on: types, None, one, and constants."""
    tl.store(out_ptr + 0, 0.0)
    if x_ptr is not None:
        tl.store(out_ptr + 0, tl.load(x_ptr).to(tl.float64))
    if n is None:
        tl.store(out_ptr + 1, -1.0)
        tl.store(out_ptr + 2, -1.0)
    else:
        n = n + tl.zeros((), tl.int1)
        tl.store(out_ptr + 1, n.to(tl.float64))
        tl.store(out_ptr + 2, n.dtype.primitive_bitwidth + (1000.0 if n.dtype.is_floating() else 0.0))
    if CONST is None:
        tl.store(out_ptr + 3, -1.0)
    elif CONST == "text":
        tl.store(out_ptr + 3, -2.0)
    elif CONST is tl.float32:
        tl.store(out_ptr + 3, -3.0)
    else:
        tl.store(out_ptr + 3, tl.full((), CONST, tl.float32))


parts_jit = triton.jit(parts)


@pytest.fixture
def parts_kernel():
    return kernel(parts)


@pytest.fixture
def compilations(monkeypatch):
    """What was asked of the backend: nothing, once a variant is known."""
    calls = []
    compiled = module.compiled
    monkeypatch.setattr(module, "compiled", lambda *args: (calls.append(args), compiled(*args))[1])
    return calls


def both(short, *args, **kwargs):
    """What the kernel wrote, having checked that Triton's own launch writes the same."""
    out, expected = torch.full((2, 4), 99.0, dtype=torch.float64)
    short[(1,)](out, *args, **kwargs)
    with activated():
        parts_jit[(1,)](expected, *args, **kwargs)
    assert torch.equal(out, expected), (args, kwargs, out, expected)
    return out.tolist()


X = {dtype: torch.tensor([5], dtype=dtype) for dtype in (torch.float32, torch.float16, torch.int8, torch.int64)}
NUMBERS = [2, 1, 0, -1, True, False, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**62, 2**63, 2.0, 1.0, 0.5, None]
CONSTANTS = [3, 1, True, -1, 0.0, 2.5, "text", None, tl.float32, SEVEN, tl.constexpr(1), tl.constexpr(True)]


def test_every_mix_of_arguments_runs_the_variant_that_triton_would(parts_kernel):
    for repeat in range(2):  # the second time all variants are known
        for x in (*X.values(), None):
            both(parts_kernel, x, 2, CONST=3 + repeat)
        for n in NUMBERS:
            both(parts_kernel, X[torch.float32], n, CONST=3)
        for constant in CONSTANTS:
            both(parts_kernel, None, 2, CONST=constant)


def test_nothing_is_compiled_for_arguments_of_a_known_kind(parts_kernel, compilations):
    both(parts_kernel, X[torch.float32], 2)
    for n in (3, 4, 0, -7, 16):
        both(parts_kernel, torch.ones(40, dtype=torch.float32)[1:], n)
    assert len(compilations) == 1
    for n in (2**40, 2**41, -(2**50)):
        both(parts_kernel, X[torch.float32], n)
    assert len(compilations) == 2
    both(parts_kernel, X[torch.float32], 5)
    assert len(compilations) == 2


def test_defaults_and_keywords(parts_kernel):
    assert both(parts_kernel, None, 2)[3] == 3
    assert both(parts_kernel, n=2, x_ptr=None, CONST=4)[3] == 4
    assert both(parts_kernel, None, n=2, num_warps=4, num_stages=2)[1] == 2


def test_wrong_arguments_are_refused_like_any_functions(parts_kernel):
    for _ in range(2):
        with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'n'"):
            parts_kernel[(1,)](torch.zeros(4), None)
        with pytest.raises(KeyError, match="num_wraps"):
            parts_kernel[(1,)](torch.zeros(4, dtype=torch.float64), None, 2, num_wraps=4)
        both(parts_kernel, None, 2)


def test_an_integer_of_one_compiles_nothing_of_its_own(parts_kernel, compilations):
    for n in (1, 2, 3, 1):
        out = torch.zeros(4, dtype=torch.float64)
        parts_kernel[(1,)](out, None, n)
        assert out[1] == n
    assert len(compilations) == 1


@pytest.mark.parametrize(
    "grid",
    [(3,), (3, 1), (3, 1, 1), [3], torch.Size([3]), lambda meta: (-(-meta["n"] // meta["BLOCK"]),), lambda meta: [3]],
)
def test_grids_of_every_form(grid):
    y = torch.zeros(12)
    add_kernel[grid](y, torch.ones(12), 12, BLOCK=4)
    assert y.tolist() == [1.0] * 12


@pytest.mark.parametrize("grid", [(), (1, 1, 1, 1)])
def test_a_grid_has_one_to_three_axes(grid):
    with pytest.raises(ValueError, match="a grid has 1 to 3 axes, got"):
        add_kernel[grid](torch.zeros(12), torch.ones(12), 12, BLOCK=4)


def test_a_negative_grid_is_refused():
    with pytest.raises(TypeError, match=r"add_kernel: grid \(-1, 1, 1\) with"):
        add_kernel[(-1,)](torch.zeros(12), torch.ones(12), 12, BLOCK=4)


def test_parameters_and_subclasses_of_tensors_are_tensors():
    y = torch.nn.Parameter(torch.zeros(12), requires_grad=False)
    add_kernel[(3,)](y, torch.ones(12), 12, BLOCK=4)
    assert y.tolist() == [1.0] * 12


def test_what_does_not_compile_raises_tritons_error_every_time():
    @kernel
    def wrong_shapes(y_ptr):
        tl.store(y_ptr + tl.arange(0, 8), tl.arange(0, 16))

    for _ in range(2):
        with pytest.raises(triton.CompilationError, match="wrong_shapes"):
            wrong_shapes[(1,)](torch.zeros(8))


def test_a_launch_elsewhere_is_tritons_own(monkeypatch):
    runs = []
    monkeypatch.setattr(type(add_kernel.jit), "run", lambda self, *args, **kwargs: runs.append((args, kwargs)))
    fresh = kernel(add_kernel.jit.fn)
    x = torch.zeros(4, device="meta")
    fresh[(1,)](x, x, 4, BLOCK=4, num_warps=2)
    fresh[(2, 1)](x, x, 4, BLOCK=4)
    assert [(args, kwargs["grid"], kwargs["warmup"]) for args, kwargs in runs] == [
        ((x, x, 4), (1, 1, 1), False),
        ((x, x, 4), (2, 1, 1), False),
    ]
    assert runs[0][1]["num_warps"] == 2
    assert runs[0][1]["BLOCK"] == 4


def test_cpu_tensors_and_others_by_turns(monkeypatch):
    fresh = kernel(add_kernel.jit.fn)
    y, x = torch.zeros(4), torch.zeros(4, device="meta")
    fresh[(1,)](y, torch.ones(4), 4, BLOCK=4)
    runs = []
    with monkeypatch.context() as patch:
        patch.setattr(type(fresh.jit), "run", lambda self, *args, **kwargs: runs.append(args))
        fresh[(1,)](x, x, 4, BLOCK=4)
    fresh[(1,)](y, torch.ones(4), 4, BLOCK=4)
    assert len(runs) == 1
    assert y.tolist() == [2.0] * 4


def test_binding_tensors_elsewhere_is_refused():
    x = torch.zeros(4, device="meta")
    with pytest.raises(TypeError, match="add_kernel: y_ptr is on meta, must be on the CPU"):
        add_kernel.bind((1,), x, x, 4, BLOCK=4)


def test_interpreted_kernels_run_in_the_interpreter():
    code = """
import torch, triton
from tests.kernels.add_kernel import add_kernel
from triton.runtime.interpreter import InterpretedFunction
y = torch.zeros(12)
add_kernel[(3,)](y, torch.ones(12), 12, BLOCK=4)
print(type(add_kernel) is InterpretedFunction, y.unique().tolist())
"""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout == "True [1.0]\n", done.stderr
