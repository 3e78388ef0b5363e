"""Without a GPU the kernels run in Triton's interpreter, which must be chosen before the first `triton.jit`."""

import os

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)  # the models are tiny, and on a busy machine thread pools wait for each other
