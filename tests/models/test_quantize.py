"""Quantising: no worse than plain rounding, exact where it can be, and refused where it cannot be right."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lychee.kernels.quantized import dequantize
from lychee.kernels.types import Int4Weight, Int8Weight
from lychee.models.files import ModelError
from lychee.models.quant_format import INT8, QuantFormat, format_of
from lychee.models.quantize import pack_int4, quantize, relative_error

NAMES = ["int8", "int8-g32", *(f"int4-g{g}-{kind}" for g in (32, 64, 128) for kind in ("sym", "zero", "min"))]
FORMATS = [QuantFormat.parse(name) for name in NAMES]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def squared_error(weight, made):
    """Of each row, in float64."""
    return (dequantize(made).double() - weight.double()).square().sum(1)


def plainly_rounded(weight, fmt):
    """What round to nearest makes of the whole range, written without the module under test."""
    x = weight.double().view(-1, fmt.group or weight.shape[1])
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    if fmt.kind == "sym":
        most = 127 if fmt.bits == 8 else 7
        scale = (x.abs().amax(1, keepdim=True) / most).half().double()
        made = (x / scale).round().clamp(-most, most) * scale
    elif fmt.kind == "min":
        scale, low = ((high - low) / 15).half().double(), low.half().double()
        made = ((x - low) / scale).round().clamp(0, 15) * scale + low
    else:
        scale = (high.clamp(min=0) - low.clamp(max=0)) / 15
        zero = (-low.clamp(max=0) / scale).round()
        made = scale * ((x / scale).round() + zero).clamp(0, 15) - scale * zero
    return (made - x).square().view(len(weight), -1).sum(1)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_parsed_and_given_back(name):
    assert QuantFormat.parse(name).name == name


@pytest.mark.parametrize(("short", "full"), [("int4", "int4-g32-min"), ("int4-g128", "int4-g128-min")])
def test_short_names_stand_for_minimums(short, full):
    assert QuantFormat.parse(short).name == full


@pytest.mark.parametrize("name", ["", "int5", "INT8", "int8-g64", "int4-g16", "int4-min", "int4-g32-", "int4 ", "fp8"])
def test_other_names_are_refused_with_those_allowed(name):
    with pytest.raises(ValueError, match=r"quantisation format is .*must be int8, int8-g32, int4, or int4-g32"):
        QuantFormat.parse(name)


def test_projections_have_the_format_asked_for_and_the_head_int8():
    fmt = QuantFormat.parse("int4")
    for tied in (False, True):
        assert format_of("model.layers.11.mlp.down_proj.weight", fmt, tied) == fmt
        assert format_of("lm_head.weight", fmt, tied) == INT8
        assert format_of("model.layers.0.self_attn.q_proj.bias", fmt, tied) is None
        assert format_of("model.layers.0.self_attn.q_norm.weight", fmt, tied) is None
        assert format_of("model.norm.weight", fmt, tied) is None
    assert format_of("model.embed_tokens.weight", fmt, tied=True) == INT8
    assert format_of("model.embed_tokens.weight", fmt, tied=False) is None


@pytest.mark.parametrize("fmt", FORMATS, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_is_no_larger_than_plain_roundings(fmt, dtype):
    weight = torch.cat([random(48, 256), random(16, 256, seed=1) ** 3, random(8, 256, seed=2).abs()]).to(dtype)
    made = quantize(weight, fmt)
    assert (squared_error(weight, made) <= plainly_rounded(weight, fmt) * (1 + 1e-5)).all()
    assert relative_error(weight, made) == pytest.approx(
        (squared_error(weight, made).sum() / weight.double().square().sum()).sqrt().item(), rel=1e-4
    )


@pytest.mark.parametrize(("name", "gain"), [("int4-g32-sym", 0.12), ("int4-g32-min", 0.04), ("int4-g128-zero", 0.04)])
def test_clipping_takes_a_part_of_the_error_of_normal_weights_away(name, gain):
    weight, fmt = random(128, 512), QuantFormat.parse(name)
    ratio = squared_error(weight, quantize(weight, fmt)).sum() / plainly_rounded(weight, fmt).sum()
    assert ratio < (1 - gain) ** 2


@pytest.mark.parametrize("fmt", FORMATS, ids=NAMES)
def test_what_can_be_represented_comes_back_exactly(fmt):
    generator = torch.Generator().manual_seed(3)
    group = fmt.group or 256
    groups = 64 * 256 // group
    least, most = (-127, 127) if fmt.bits == 8 else (0, 15)
    q = torch.randint(least, most + 1, (groups, group), generator=generator)
    q[:, 0], q[:, 1] = least, most  # the whole range is used
    scale = (torch.rand(groups, 1, generator=generator) * 0.1 + 0.01).half().float()
    zero = torch.randint(1, 15, (groups, 1), generator=generator)
    low = {"sym": 0 if fmt.bits == 8 else -8 * scale, "zero": -scale * zero, "min": (random(groups, 1) / 8).half()}
    weight = (q * scale + low[fmt.kind]).view(64, 256)
    assert torch.equal(dequantize(quantize(weight, fmt)), weight)


@pytest.mark.parametrize("fmt", FORMATS, ids=NAMES)
def test_shapes_and_dtypes(fmt):
    made = quantize(random(6, 256), fmt)
    groups = 256 // fmt.group if fmt.group else 1
    assert made.scales.shape == (6, groups)
    assert made.scales.dtype == (torch.float32 if fmt.kind == "zero" else torch.float16)
    if fmt.bits == 8:
        assert isinstance(made, Int8Weight)
        assert made.values.shape == (6, 256)
    else:
        assert isinstance(made, Int4Weight)
        assert made.packed.shape == (6, 128)
        assert (made.minimums is None) == (fmt.kind == "sym")


@pytest.mark.parametrize("fmt", FORMATS, ids=NAMES)
def test_large_and_strided_matrices_are_the_rows_of_small_ones(fmt):
    weight = random(1024, 700, seed=5)  # several chunks
    made = dequantize(quantize(weight.T, fmt))
    assert torch.equal(made[340:350], dequantize(quantize(weight.T[340:350].contiguous(), fmt)))


def test_packing_puts_elements_16_apart_into_one_byte():
    q = torch.arange(64, dtype=torch.uint8)[None] % 16
    q[0, 16:32] = 5
    packed = pack_int4(q)
    assert packed.shape == (1, 32)
    assert packed[0, 3] == 3 + 16 * 5
    assert packed[0, 18] == 2 + 16 * 2


def test_zeros_of_minimums_are_whole_and_products_exact():
    weight = random(32, 256) * torch.logspace(-9, 9, 32)[:, None]
    made = quantize(weight, QuantFormat.parse("int4-g32-zero"))
    zeros = -made.minimums.double() / made.scales.double()
    assert torch.equal(zeros, zeros.round())
    assert zeros.min() >= 0
    assert zeros.max() <= 15


@pytest.mark.parametrize("fmt", FORMATS, ids=NAMES)
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-7, 1e-4, 1e5, 1e12])
def test_scales_that_float16_cannot_hold_are_float32(fmt, size):
    weight = random(4, 128)
    made = quantize(weight * size, fmt)
    assert dequantize(made).isfinite().all()
    if size > 1e-37:  # below, float32 itself runs out
        assert relative_error(weight * size, made) < 1.1 * relative_error(weight, quantize(weight, fmt)) + 1e-4


@pytest.mark.parametrize("fmt", FORMATS, ids=NAMES)
def test_zeros_and_constants(fmt):
    assert dequantize(quantize(torch.zeros(3, 128), fmt)).count_nonzero() == 0
    mixed = random(4, 256)
    mixed[1] = 0
    mixed[2, :128] = 0
    made = dequantize(quantize(mixed, fmt))
    assert made[1].count_nonzero() == 0
    assert made[2, :128].count_nonzero() == 0
    for constant in (0.37, -0.37, 1e-6, -3e4):
        made = dequantize(quantize(torch.full((2, 128), constant), fmt))
        torch.testing.assert_close(made, torch.full((2, 128), constant), rtol=1e-3, atol=0)


def test_nearly_constant_groups_keep_their_differences():
    weight = 1 + 1e-5 * random(4, 128)
    made = quantize(weight, QuantFormat.parse("int4-g32-min"))
    assert relative_error(weight - 1, quantize(weight - 1, QuantFormat.parse("int4-g32-min"))) < 0.1
    assert (dequantize(made) - weight).abs().max() < 1e-5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e16])
def test_weights_that_are_not_finite_are_refused_by_name(bad):
    weight = random(300, 1024)
    weight[299, 7] = bad
    for fmt in FORMATS:
        with pytest.raises(ModelError, match=r"model\.x has the weight .*, must have finite ones of at most 1e\+15"):
            quantize(weight, fmt, "model.x")


def test_rows_that_are_no_whole_number_of_groups_are_refused_with_what_fits():
    with pytest.raises(
        ModelError,
        match=r"w has 96 in_features, int4-g64-sym needs a multiple of 64; int4-g32-sym, int8-g32, int8 would",
    ):
        quantize(torch.ones(2, 96), QuantFormat.parse("int4-g64-sym"), "w")
    with pytest.raises(ModelError, match=r"has 20 in_features, int8-g32 needs a multiple of 32; int8 would fit"):
        quantize(torch.ones(2, 20), QuantFormat.parse("int8-g32"))
    assert quantize(random(3, 7), INT8).values.shape == (3, 7)


@pytest.mark.parametrize("weight", [torch.ones(4), torch.ones(2, 2, 2), torch.ones(2, 32).int(), torch.ones(0, 32)])
def test_what_is_no_matrix_of_floats_is_refused(weight):
    with pytest.raises(ModelError, match="must be a matrix of floats"):
        quantize(weight, INT8)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_finite_weights_come_out_within_a_step(data):
    fmt = data.draw(st.sampled_from(FORMATS))
    rows, groups = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    shape = (rows, groups * (fmt.group or data.draw(st.integers(1, 70))))
    weight = random(*shape, seed=data.draw(st.integers(0, 99))) + data.draw(st.sampled_from([0.0, 0.0, 2.0, -50.0]))
    weight *= 10.0 ** data.draw(st.integers(-12, 12))
    for _ in range(data.draw(st.integers(0, 3))):
        row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, shape[1] - 1))
        weight[row, column:] = data.draw(st.floats(-1e3, 1e3, width=32) | st.just(0.0))
    made = dequantize(quantize(weight, fmt))
    assert made.isfinite().all()
    x, y = (w.view(-1, fmt.group or shape[1]) for w in (weight, made))
    span = x.abs().amax(1) if fmt.kind == "sym" else x.amax(1).clamp(min=0) - x.amin(1).clamp(max=0)
    root_mean_square = (x - y).square().mean(1).sqrt()
    assert (root_mean_square <= span / (200 if fmt.bits == 8 else 13)).all()
