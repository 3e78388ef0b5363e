"""Kernels run compiled: for the GPU where there is one, else for the CPU."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(1)  # the models are tiny, and on a busy machine thread pools wait for each other


@pytest.fixture(autouse=True)
def numbers_as_python_starts_with_them():
    """Libraries that are compiled for speed flush subnormal numbers to zero from when they are loaded, in all code."""
    torch.set_flush_denormal(False)
