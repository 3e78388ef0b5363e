"""A gated linear layer has the bits of the ops that it stands for, and refuses weights that it has no kernel for."""

from dataclasses import replace

import pytest
import torch

from lychee.kernels import gated_linear, gated_linear_int8, linear, linear_int8, swiglu
from tests.conftest import DEVICE

from .batches import bits

ROWS = (1, 2, 5, 8, 9, 13, 33)
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="elsewhere tiles are not those of the ops that are fused")


@pytest.mark.parametrize("has_bias", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pair", [(gated_linear, linear), (gated_linear_int8, linear_int8)], ids=["dense", "int8"])
def test_it_has_the_bits_of_two_layers_and_a_gate(pair, dtype, has_bias):
    fused, layer = pair
    torch.manual_seed(0)
    for in_features, out_features in ((128, 224), (96, 70)):
        for rows in ROWS:
            sizes = {"num_tokens": rows, "in_features": in_features, "out_features": out_features}
            given = fused.sample(dtype, DEVICE, **sizes, has_bias=has_bias)
            gate = layer(given["x"], given["gate"], given["gate_bias"])
            up = layer(given["x"], given["up"], given["up_bias"])
            assert bits(fused(**given)) == bits(swiglu(gate, up)), (rows, sizes)


def test_scales_of_groups_are_refused():
    given = gated_linear_int8.sample(torch.float32, DEVICE, num_tokens=1, in_features=64, out_features=8, has_bias=0)
    grouped = {n: replace(given[n], scales=given[n].scales.expand(8, 2).contiguous()) for n in ("gate", "up")}
    with pytest.raises(ValueError, match=r"scales of \[32, 32\] elements, must have one of each row of 64"):
        gated_linear_int8(**{**given, **grouped})
