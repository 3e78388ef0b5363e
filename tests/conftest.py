"""Kernels run compiled: for the GPU where there is one, else for the CPU."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(1)  # the models are tiny, and on a busy machine thread pools wait for each other
