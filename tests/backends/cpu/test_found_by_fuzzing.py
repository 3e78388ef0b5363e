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
