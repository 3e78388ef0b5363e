"""Every op: the Triton launch equals the torch reference, on drawn inputs, poisoned memory, between guard rims."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lychee.kernels import OPS
from tests.conftest import DEVICE
from tests.kernels.harness import check_launch

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
# Sizes drawn for each axis name. Small, odd and around block edges; the interpreter is slow.
AXES = {
    "num_tokens": st.integers(1, 9),
    "hidden": st.integers(1, 200),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_launch_equals_reference(name, dtype, data):
    op = OPS[name]
    torch.manual_seed(data.draw(st.integers(0, 2**31), label="seed"))
    sizes = {axis: data.draw(AXES[axis], label=axis) for axis in op.axes}
    check_launch(op, op.sample(dtype, DEVICE, **sizes), dtype)
