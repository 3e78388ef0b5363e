"""What random kernels found: each a small kernel, named after what must hold."""

import pytest
import torch
import triton
import triton.language as tl

from lychee.backends.cpu import activated


@triton.jit
def signed_narrow(out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, 1, mask=at.to(tl.int8) * 3 < n)


@triton.jit
def unsigned_narrow(out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, 1, mask=(at + 15).to(tl.uint8) * 9 < n)


@triton.jit
def far(out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, 1, mask=(at + 2147483640) < n)


LANES = torch.arange(64, dtype=torch.int32)
WRAPPING = {
    signed_narrow: LANES.to(torch.int8) * 3 < 5,
    unsigned_narrow: (LANES + 15).to(torch.uint8) * 9 < 81,
    far: LANES + torch.tensor(2147483640, dtype=torch.int32) < 5,
}


@pytest.mark.parametrize("kernel", WRAPPING, ids=lambda k: k.__name__)
def test_a_mask_on_integers_that_wrap_around_is_no_prefix(kernel: triton.JITFunction) -> None:
    out = torch.zeros(64, dtype=torch.int32)
    with activated():
        kernel[(1,)](out, 81 if kernel is unsigned_narrow else 5, BLOCK=64)
    torch.testing.assert_close(out, WRAPPING[kernel].int())


@triton.jit
def narrowed(y, x):
    at = tl.arange(0, 2)[:, None] * 4 + tl.arange(0, 4)[None, :]
    quotients = tl.load(x + at) // ((tl.load(x + at) & 7) + 1)
    tl.store(y + at, quotients.to(tl.int32), mask=at.to(tl.int16) * 900 < 10)


def test_a_masked_store_of_narrowed_integers_writes_no_more_than_them() -> None:
    """LLVM 22 writes the 64-bit quotient where the mask comes down to one lane."""
    y = torch.full((8,), -1, dtype=torch.int32)
    with activated():
        narrowed[(1,)](y, torch.arange(100, 108))
    assert y.tolist() == [20, *[-1] * 7]
