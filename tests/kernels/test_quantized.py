"""Quantised weights whose parts do not fit each other, or x, are refused before anything is launched."""

import pytest
import torch

from lychee.kernels import embed_int4, embed_int8, linear_int4, linear_int8
from lychee.kernels.linear import linear_kernel
from lychee.kernels.linear_int4 import _linear_int4_kernel
from lychee.kernels.quantized import RUN, dequantize, sample_int4
from lychee.kernels.types import Int4Weight, Int8Weight


def int8(in_features: int, groups: int) -> Int8Weight:
    return Int8Weight(torch.ones(3, in_features, dtype=torch.int8), torch.ones(3, groups))


def int4(in_features: int, groups: int) -> Int4Weight:
    return Int4Weight(torch.ones(3, in_features // 2, dtype=torch.uint8), torch.ones(3, groups), None)


@pytest.mark.parametrize(("in_features", "groups"), [(64, 3), (96, 2), (64, 0), (100, 4)])
def test_scales_for_no_group_there_is_are_refused(in_features, groups):
    x, tokens = torch.zeros(2, in_features), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"has {groups} scales in a row of {in_features}, must have one per"):
        linear_int8(x, int8(in_features, groups))
    with pytest.raises(ValueError, match=r"must have one per 32 or 64 or 128"):
        linear_int4(x, int4(in_features, groups))
    with pytest.raises(ValueError, match="scales in a row"):
        embed_int8(tokens, int8(in_features, groups), x[0])
    with pytest.raises(ValueError, match="scales in a row"):
        embed_int4(tokens, int4(in_features, groups), x[0])


def test_features_that_the_weight_has_not_are_refused():
    with pytest.raises(ValueError, match="weight has 64 in_features, x has 32"):
        linear_int4(torch.zeros(2, 32), int4(64, 2))


@pytest.mark.parametrize("groups", [1, 2])
def test_every_group_that_fits_is_multiplied_by_its_own_scale(groups):
    torch.manual_seed(0)
    weight = Int8Weight(torch.randint(-127, 128, (5, 64), dtype=torch.int8), torch.rand(5, groups))
    x = torch.randn(3, 64)
    torch.testing.assert_close(linear_int8(x, weight), x @ dequantize(weight).T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("row_tiles", [1, 2, 4])
@pytest.mark.parametrize("form", ["dense", "int8", "int8 in groups"])
def test_every_tile_of_rows_that_a_program_takes_is_right(form, row_tiles):
    """On the CPU a program takes one; a GPU's takes up to four."""
    torch.manual_seed(0)
    x, bias, y = torch.randn(13, 64), torch.randn(20), torch.zeros(13, 20)
    if form == "dense":
        weight, scales, group = torch.randn(20, 64), None, 0
        dense = weight
    else:
        groups = 2 if "groups" in form else 1
        made = Int8Weight(torch.randint(-127, 128, (20, 64), dtype=torch.int8), torch.rand(20, groups) / 64)
        weight, scales, group, dense = made.values, made.scales, 32 if groups == 2 else 0, dequantize(made)
    grid = (-(-13 // (4 * row_tiles)), 2)
    linear_kernel[grid](y, x, weight, scales, bias, 13, 20, 64, group, 0, 0, row_tiles, 4, 16, 32)
    torch.testing.assert_close(y, x @ dense.T + bias, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("row_tiles", [1, 2])
@pytest.mark.parametrize("minimums", [True, False])
def test_every_tile_of_rows_is_right_over_int4(minimums, row_tiles):
    torch.manual_seed(0)
    weight = sample_int4(20, 64, 32, int(minimums), 1, "cpu")
    x, y = torch.randn(13, 64), torch.zeros(13, 20)
    grid = (-(-13 // (4 * row_tiles)), 2)
    sizes = 13, 20, 64, 32, RUN, 0, 0, row_tiles, 4, 16, 32
    _linear_int4_kernel[grid](y, x, weight.packed, weight.scales, weight.minimums, None, *sizes)
    torch.testing.assert_close(y, x @ dequantize(weight).T, rtol=1e-4, atol=1e-3)
