"""Every op: the Triton launch equals the torch reference, on drawn inputs, poisoned memory, between guard rims."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lychee.kernels import OPS
from tests.conftest import DEVICE
from tests.kernels.harness import check_launch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Sizes drawn for each axis name: small, odd and around block edges. Those of one class mostly share their kernels.
AXES = {
    "num_seqs": [st.integers(1, 3)],
    "num_layers": [st.integers(1, 3)],
    "max_path": [st.integers(1, 6)],
    "max_nodes": [st.integers(1, 9), st.integers(20, 33)],
    "max_rows": [st.integers(1, 40)],
    "max_context": [st.sampled_from([0, 1, 5, 31, 32, 33, 50, 64, 80]), st.sampled_from([256, 300, 600, 1100])],
    "window": [st.just(0), st.sampled_from([1, 7, 32, 45]), st.just(300)],
    "block_size": [st.just(1), st.just(3), st.just(16)],
    "group": [st.just(1), st.just(3), st.just(4)],
    "num_tokens": [st.just(1), st.just(2), st.integers(3, 4), st.integers(5, 9)],
    "hidden": [st.integers(1, 200)],
    "model_vocab": [st.integers(1, 300)],
    "in_features": [st.integers(1, 200)],
    "out_features": [st.integers(1, 150)],
    "has_bias": [st.just(0), st.just(1)],
    "intermediate": [st.integers(1, 300)],
    "num_heads": [st.integers(1, 5)],
    "num_kv_heads": [st.integers(1, 3)],
    "head_dim": [st.just(1), st.just(16), st.just(20), st.just(40)],
    "num_slots": [st.integers(1, 30)],
    "num_rows": [st.integers(1, 5)],
    "vocab": [st.sampled_from([1, 2, 5, 64, 1023, 1024, 1025, 2049, 4096, 4097])],
    "padding": [st.integers(0, 3)],
    "num_samples": [st.integers(1, 4)],
    "has_counts": [st.just(False), st.just(True)],
    "replacement": [st.just(False), st.just(True)],
    "num_positions": [st.integers(1, 40)],
    "int8_cache": [st.just(0), st.just(1)],
    "num_outputs": [st.integers(1, 300)],
    "grouped": [st.just(0), st.just(1)],
    "group_kind": [st.just(0), st.just(1), st.just(2)],
    "has_minimums": [st.just(0), st.just(1)],
    "exact_scales": [st.just(0), st.just(1)],
}
COMBINATIONS = 12


def combinations(axes, dtype):
    """A class of each axis, COMBINATIONS times: each of an axis's classes is in as many of them as any other.

    Few of all that could be, and others for each dtype: each makes kernels, and compiling takes most of the time.
    """
    columns = []
    for axis, classes in axes.items():
        column = [classes[i % len(classes)] for i in range(COMBINATIONS)]
        random.Random(f"{axis} {dtype}").shuffle(column)
        columns.append(column)
    return [dict(zip(axes, row, strict=True)) for row in zip(*columns, strict=True)]


def check(name, dtype, examples, axes=AXES):
    op = OPS[name]
    combined = combinations({axis: axes[axis] for axis in op.axes}, dtype)

    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def launch_equals_reference(data):
        torch.manual_seed(data.draw(st.integers(0, 2**31), label="seed"))
        combination = data.draw(st.sampled_from(combined))
        sizes = {axis: data.draw(drawn, label=axis) for axis, drawn in combination.items()}
        check_launch(op, op.sample(dtype, DEVICE, **sizes), dtype)

    launch_equals_reference()


def test_every_class_of_sizes_is_in_as_many_combinations_as_any_other():
    for dtype in DTYPES:
        for axis, classes in AXES.items():
            drawn = [combination[axis] for combination in combinations(AXES, dtype)]
            assert [drawn.count(c) for c in classes] == [COMBINATIONS // len(classes)] * len(classes), axis


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_launch_equals_reference(name, dtype):
    check(name, dtype, 16)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_launch_equals_reference_on_many_examples(name, dtype):
    check(name, dtype, 200)
