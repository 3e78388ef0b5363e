"""The generic kernel check is itself checked: it passes a healthy launch and catches each kind of injected fault."""

from typing import Annotated

import pytest
import torch
import triton.language as tl

from lychee.kernels import Op
from lychee.kernels.kernel import kernel
from lychee.kernels.rms_norm import rms_norm_cost, rms_norm_reference, rms_norm_sample
from lychee.kernels.types import FLOAT, Cost, Hidden, Spec
from tests.conftest import DEVICE
from tests.kernels.harness import check_launch

SIZES = {"num_tokens": 3, "hidden": 13}


@kernel
def _rms_norm_with_fault(y_ptr, x_ptr, weight_ptr, hidden, eps, FAULT: tl.constexpr, BLOCK_H: tl.constexpr):
    token = tl.program_id(0)
    offs_h = tl.arange(0, BLOCK_H)
    mask_h = offs_h < hidden
    store_mask = mask_h
    if FAULT == "no load mask":
        mask_h = offs_h < BLOCK_H
    x = tl.load(x_ptr + token * hidden + offs_h, mask=mask_h, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + offs_h, mask=mask_h, other=0.0).to(tl.float32)
    if FAULT == "wrong divisor":
        rstd = tl.rsqrt(tl.sum(x * x, axis=0) / BLOCK_H + eps)
    else:
        rstd = tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
    if FAULT == "no store mask":
        store_mask = offs_h < BLOCK_H
    if FAULT == "one element past the end":
        store_mask = offs_h <= hidden
    if FAULT == "last element unwritten":
        store_mask = offs_h < hidden - 1
    tl.store(y_ptr + token * hidden + offs_h, x * rstd * weight, mask=store_mask)
    if FAULT == "store below the first element":
        tl.store(y_ptr - 1, rstd)
    if FAULT == "input mutated":
        tl.store(x_ptr + token * hidden + offs_h, x * rstd, mask=store_mask)
    if FAULT == "store past an input":
        tl.store(weight_ptr + hidden, rstd)


def rms_norm_with(fault):
    def launch(y, x, weight, eps):
        rows = x.shape[0] - (fault == "last row unwritten")
        _rms_norm_with_fault[(rows,)](y, x, weight, x.shape[1], eps, FAULT=fault, BLOCK_H=16)

    return Op(launch, rms_norm_reference, rms_norm_sample, rms_norm_cost, SIZES, None)


def check(op, dtype):
    torch.manual_seed(0)
    check_launch(op, op.sample(dtype, DEVICE, **SIZES), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_healthy_launch_passes(dtype):
    check(rms_norm_with("none"), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("no store mask", "guard rim written"),
        ("one element past the end", "guard rim written"),
        ("store below the first element", "guard rim written"),
        ("last element unwritten", "not close"),
        ("last row unwritten", "not close"),
        ("wrong divisor", "not close"),
        ("no load mask", "not close"),
        ("input mutated", "x changed"),
        ("store past an input", "weight changed"),
    ],
)
def test_faulty_launch_is_caught(fault, complaint, dtype):
    with pytest.raises(AssertionError, match=complaint):
        check(rms_norm_with(fault), dtype)


HiddenWritten = Annotated[torch.Tensor, Spec("num_tokens hidden", FLOAT, mutated=True)]


def double_reference(x: Hidden, state: HiddenWritten) -> Hidden:
    state.mul_(2)
    return x + state


def double_sample(dtype, device, *, num_tokens, hidden):
    return {name: torch.randn(num_tokens, hidden, dtype=dtype, device=device) for name in ("x", "state")}


def double_with(launch, scratch=None):
    return Op(launch, double_reference, double_sample, lambda x, state: Cost(0, 0), SIZES, scratch)


def test_declared_mutation_passes_and_must_equal_the_reference():
    def healthy(y, x, state):
        state.mul_(2)
        y.copy_(x + state)

    def forgetful(y, x, state):
        y.copy_(x + 2 * state)

    check(double_with(healthy), torch.float32)
    with pytest.raises(AssertionError, match="state changed"):
        check(double_with(forgetful), torch.float32)


def test_scratch_is_poisoned_and_guarded():
    def scratch(x, state):
        return {"partial": (tuple(x.shape), x.dtype)}

    def healthy(y, partial, x, state):
        partial.copy_(x)
        state.mul_(2)
        y.copy_(partial + state)

    def trusting(y, partial, x, state):  # takes fresh scratch for zeros
        partial += x
        state.mul_(2)
        y.copy_(partial + state)

    def overrunning(y, partial, x, state):
        healthy(y, partial, x, state)
        partial.as_strided((1,), (1,), partial.storage_offset() + partial.numel()).fill_(0)

    check(double_with(healthy, scratch), torch.float32)
    with pytest.raises(AssertionError, match="not close"):
        check(double_with(trusting, scratch), torch.float32)
    with pytest.raises(AssertionError, match="guard rim written"):
        check(double_with(overrunning, scratch), torch.float32)
