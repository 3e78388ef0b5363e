"""Kernels of many kinds that no stage of the compiler was written for run compiled and give the right results."""

import os
import subprocess
import sys

import pytest
import torch

from lychee.backends.cpu import activated
from tests.backends.cpu import unseen_matrices, unseen_memory, unseen_numbers, unseen_sequences
from tests.backends.cpu.cases import Case, label, parameters

MODULES = (unseen_sequences, unseen_matrices, unseen_memory, unseen_numbers)
CASES = tuple(case for module in MODULES for case in module.CASES)


@pytest.mark.parametrize(("case", "dtype"), parameters(CASES), ids=label)
def test_unseen_kernel_compiled_gives_the_right_results(case: Case, dtype: torch.dtype) -> None:
    with activated():
        case.verify(dtype)


def test_unseen_kernels_are_right_in_the_interpreter() -> None:
    """The other tests mean little if the kernels themselves are wrong."""
    command = [sys.executable, "-m", "tests.backends.cpu.interpret", *(m.__name__ for m in MODULES)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stdout + done.stderr
