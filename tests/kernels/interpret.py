"""Runs every op's launch in Triton's interpreter against its reference: `python -m tests.kernels.interpret`.

Kernels are interpreted or compiled for the life of a process. bf16 is left out: the interpreter computes with its bits.
"""

import os
import sys
import traceback

os.environ["TRITON_INTERPRET"] = "1"

import torch
from hypothesis import strategies as st

from lychee.kernels import OPS
from tests.kernels.test_ops import AXES, check

EXAMPLES = 6
SMALLER = {  # it takes a millisecond or so for every op of every program
    "max_context": [st.sampled_from([0, 5, 33])],
    "max_nodes": [st.integers(1, 5)],
    "max_rows": [st.integers(1, 9)],
    "num_samples": [st.integers(1, 2)],
    "vocab": [st.sampled_from([1, 64, 1025])],
}


def main() -> int:
    failures = 0
    for name in sys.argv[1:] or OPS:
        for dtype in (torch.float32, torch.float16):
            try:
                check(name, dtype, EXAMPLES, {**AXES, **SMALLER})
                print(f"{name} {dtype}: passed")
            except Exception:
                failures += 1
                print(f"{name} {dtype}: failed\n{traceback.format_exc()}")
    return failures


if __name__ == "__main__":
    sys.exit(min(main(), 100))
