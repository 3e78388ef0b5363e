"""Every op: the Triton launch equals the torch reference, on drawn inputs, poisoned memory, between guard rims."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lychee.kernels import OPS
from tests.conftest import DEVICE
from tests.kernels.harness import check_launch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Sizes drawn for each axis name: small, odd and around block edges. Few where each makes other kernels: most of the
# time goes to compiling.
AXES = {
    "num_seqs": st.integers(1, 3),
    "num_layers": st.integers(1, 3),
    "max_path": st.integers(1, 6),
    "max_nodes": st.integers(1, 9),
    "max_rows": st.integers(1, 40),
    "max_context": st.sampled_from([0, 1, 5, 31, 32, 33, 50, 64, 80]),
    "window": st.sampled_from([0, 0, 1, 7, 32, 45]),
    "block_size": st.sampled_from([1, 3, 16]),
    "group": st.sampled_from([1, 3, 4]),
    "num_tokens": st.integers(1, 9),
    "hidden": st.integers(1, 200),
    "model_vocab": st.integers(1, 300),
    "in_features": st.integers(1, 200),
    "out_features": st.integers(1, 150),
    "has_bias": st.integers(0, 1),
    "intermediate": st.integers(1, 300),
    "num_heads": st.integers(1, 5),
    "num_kv_heads": st.integers(1, 3),
    "head_dim": st.sampled_from([1, 16, 20, 40]),
    "num_slots": st.integers(1, 30),
    "num_rows": st.integers(1, 5),
    "vocab": st.sampled_from([1, 2, 5, 64, 1023, 1024, 1025, 2049, 4096, 4097]),
    "padding": st.integers(0, 3),
    "num_samples": st.integers(1, 4),
    "has_counts": st.booleans(),
    "replacement": st.booleans(),
    "num_positions": st.integers(1, 40),
    "int8_cache": st.integers(0, 1),
    "num_outputs": st.integers(1, 300),
    "grouped": st.integers(0, 1),
    "group_kind": st.integers(0, 2),
    "has_minimums": st.integers(0, 1),
    "exact_scales": st.integers(0, 1),
}


def check(name, dtype, examples, axes=AXES):
    op = OPS[name]

    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def launch_equals_reference(data):
        torch.manual_seed(data.draw(st.integers(0, 2**31), label="seed"))
        sizes = {axis: data.draw(axes[axis], label=axis) for axis in op.axes}
        check_launch(op, op.sample(dtype, DEVICE, **sizes), dtype)

    launch_equals_reference()


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_launch_equals_reference(name, dtype):
    check(name, dtype, 16)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_launch_equals_reference_on_many_examples(name, dtype):
    check(name, dtype, 200)
