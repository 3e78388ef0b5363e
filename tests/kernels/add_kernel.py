"""A kernel in a file of its own, for tests that run it in several processes."""

import triton.language as tl

from lychee.kernels.kernel import kernel


@kernel
def add_kernel(y_ptr, x_ptr, n, BLOCK: tl.constexpr):
    """y += x"""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    tl.store(y_ptr + offs, tl.load(y_ptr + offs, mask=mask) + tl.load(x_ptr + offs, mask=mask), mask=mask)
