"""Reshapes: axes that stay are told from axes that are split or joined, so masks along the former can be proven."""

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lychee.backends.cpu import activated, order
from lychee.backends.cpu.shapes import keeps_runs, matched_axes
from tests.backends.cpu.memory import guard
from tests.backends.cpu.stages import func_of

SIZES = st.sampled_from([1, 1, 2, 4, 8, 16, 32])


@st.composite
def shape_pairs(draw):
    """Two shapes of equally many elements."""
    ours = tuple(draw(st.lists(SIZES, min_size=1, max_size=4)))
    left, theirs = math.prod(ours), []
    while left > 1:
        part = min(left, draw(st.sampled_from([1, 2, 4, 16, 64])))
        theirs.append(part)
        left //= part
    return ours, tuple(theirs) or (1,)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shape_pairs())
def test_matched_axes_cover_both_shapes_in_order_with_equal_products(shapes):
    pairs = list(matched_axes(*shapes))
    for side, shape in enumerate(shapes):
        assert [n for pair in pairs for n in shape[pair[side]]] == list(shape)
    for ours, theirs in pairs:
        assert math.prod(shapes[0][ours]) == math.prod(shapes[1][theirs])


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        ((4, 2, 32), (4, 64), True),
        ((2, 16, 3), (32, 3), True),
        ((4, 8, 8), (4, 64), False),
        ((64,), (4, 16), True),
        ((64,), (8, 8), False),
        ((3, 5), (3, 5), True),
        ((4, 16), (64, 1), True),
    ],
)
def test_runs_are_kept_where_no_short_axis_is_split_or_joined(before, after, kept):
    assert keeps_runs(before, after) is kept


@triton.jit
def scaled_product_kernel(y, x, w, s, rows, columns, K, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """y[rows, columns] = (w times its groups' scales) x; w [rows, K], x [columns, K], s [rows, K / GROUP]."""
    offs_n = tl.arange(0, BLOCK)
    offs_m = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, 2 * GROUP):
        offs_k = start + tl.arange(0, 2 * GROUP)
        inside = (offs_n < rows)[:, None] & (offs_k < K)[None, :]
        weight = tl.load(w + offs_n[:, None] * K + offs_k[None, :], mask=inside, other=0)
        offs_g = start // GROUP + tl.arange(0, 2)
        at = s + offs_n[:, None] * (K // GROUP) + offs_g[None, :]
        scale = tl.load(at, mask=(offs_n < rows)[:, None] & (offs_g < K // GROUP)[None, :], other=0.0)
        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (BLOCK, 2, GROUP)), (BLOCK, 2 * GROUP))
        pairs = start + tl.arange(0, 2)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x_at = x + offs_m[None, None, :] * K + pairs[:, :, None]
        features = tl.load(x_at, mask=(offs_m < columns)[None, None, :] & (pairs < K)[:, :, None], other=0.0)
        acc = tl.dot(weight.to(tl.float32) * scale, tl.reshape(features, (2 * GROUP, BLOCK)), acc, "ieee")
    mask = (offs_n < rows)[:, None] & (offs_m < columns)[None, :]
    tl.store(y + offs_n[:, None] * columns + offs_m[None, :], acc, mask=mask)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 3, 7, 8])
@pytest.mark.parametrize("columns", [1, 2, 5, 8])
def test_masks_beside_and_within_a_reshape_hold_to_the_byte(rows, columns, groups):
    """Memory ends at dead pages where rows, columns and groups end; a tile has two groups."""
    torch.manual_seed(0)
    depth = 32 * groups
    weights = torch.randint(-127, 128, (rows, depth), dtype=torch.int8)
    x, w, s = guard(torch.randn(columns, depth), weights, torch.rand(rows, groups))
    (y,) = guard(torch.zeros(rows, columns))
    with activated():
        scaled_product_kernel[(1,)](y, x, w, s, rows, columns, depth, BLOCK=8, GROUP=32)
    want = (w.float().view(rows, groups, 32) * s[..., None]).view(rows, depth) @ x.T
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-4)


def test_a_product_of_weights_times_spread_scales_holds_no_tile():
    tensors = [torch.zeros(1, dtype=d) for d in (torch.float32, torch.float32, torch.int8, torch.float32)]
    func = func_of(scaled_product_kernel, *tensors, 8, 8, 64, BLOCK=8, GROUP=32)
    assert str(order.analyse(func)) == ""
