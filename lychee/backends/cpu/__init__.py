"""A Triton backend for the CPU: TTIR in, vectorised multi-threaded machine code out. See README.md beside this file.

    with activated():
        kernel[grid](*cpu_tensors)

Triton imports this package while it is being imported itself: nothing heavy is imported here, nor in `compiler` or
`driver`.
"""

import triton  # noqa: F401 - first, or Triton would look for our classes in a half-read module of ours

from .driver import activated

__all__ = ["activated"]
