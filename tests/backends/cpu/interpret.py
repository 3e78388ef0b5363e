"""Runs the cases of the named modules in Triton's interpreter: `python -m tests.backends.cpu.interpret MODULE...`

Kernels are interpreted or compiled for the life of a process, so a compiled test asks this in a subprocess whether its
kernels are right at all. bf16 is left out: the interpreter adds and multiplies its bit patterns.
"""

import importlib
import os
import sys
import traceback

os.environ["TRITON_INTERPRET"] = "1"

import torch


def main(modules: list[str]) -> int:
    torch.set_num_threads(1)
    failures = 0
    for module in modules:
        for case in importlib.import_module(module).CASES:
            for dtype in case.dtypes:
                if dtype is torch.bfloat16:
                    continue
                try:
                    case.verify(dtype)
                except Exception:
                    failures += 1
                    print(f"{case.name} {dtype}\n{traceback.format_exc()}")
    return failures


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 100))
