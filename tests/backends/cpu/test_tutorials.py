"""Kernels after Triton's tutorials run compiled for the CPU and give torch's results."""

import os
import subprocess
import sys

import pytest
import torch

from lychee.backends.cpu import activated
from tests.backends.cpu import tutorials
from tests.backends.cpu.cases import Case, label, parameters


@pytest.mark.parametrize(("case", "dtype"), parameters(tutorials.CASES), ids=label)
def test_tutorial_kernel_compiled_gives_torch_results(case: Case, dtype: torch.dtype) -> None:
    with activated():
        case.verify(dtype)


def test_spin_locks_of_layer_norm_backward_hold_between_threads() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with activated():
            for _ in range(20):
                Case(tutorials.layer_norm_backward).verify(torch.float32)
    finally:
        torch.set_num_threads(threads)


def test_tutorial_kernels_are_right_in_the_interpreter() -> None:
    """The other tests mean little if the kernels themselves are wrong."""
    command = [sys.executable, "-m", "tests.backends.cpu.interpret", tutorials.__name__]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stdout + done.stderr
