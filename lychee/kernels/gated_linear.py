"""The gate of a SwiGLU layer in one launch: two linear layers of one x, and what joins them.

As the ops that it stands for: each product is summed in the order of `linear.py` and rounded before it is used.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from . import sizes
from .kernel import kernel
from .linear import (
    Config,
    cpu_config,
    decode_config,
    dot_tile,
    linear_cost,
    linear_reference,
    linear_sample,
    weight_tile,
)
from .linear_int8 import gpu_config, linear_int8_cost, linear_int8_reference, linear_int8_sample
from .op import op
from .quantized import group_size
from .sizes import cdiv
from .swiglu import swiglu_reference
from .types import Bias, Cost, Features, Int8Weight, Projected, Weight


def gated_linear_reference(
    x: Features, gate: Weight, up: Weight, gate_bias: Bias | None = None, up_bias: Bias | None = None
) -> Projected:
    return swiglu_reference(linear_reference(x, gate, gate_bias), linear_reference(x, up, up_bias))


def gated_linear_int8_reference(
    x: Features, gate: Int8Weight, up: Int8Weight, gate_bias: Bias | None = None, up_bias: Bias | None = None
) -> Projected:
    return swiglu_reference(linear_int8_reference(x, gate, gate_bias), linear_int8_reference(x, up, up_bias))


def gated(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Arguments of two linear layers as those of one that is gated."""
    names = {"x": first["x"], "gate": first["weight"], "up": second["weight"]}
    return {**names, "gate_bias": first["bias"], "up_bias": second["bias"]}


def gated_linear_sample(
    dtype: Any, device: str, *, num_tokens: int, in_features: int, out_features: int, has_bias: int
) -> dict[str, Any]:
    given = {"num_tokens": num_tokens, "in_features": in_features, "out_features": out_features, "has_bias": has_bias}
    return gated(linear_sample(dtype, device, **given), linear_sample(dtype, device, **given))


def gated_linear_int8_sample(
    dtype: Any, device: str, *, num_tokens: int, in_features: int, out_features: int, has_bias: int
) -> dict[str, Any]:
    given = {"num_tokens": num_tokens, "in_features": in_features, "out_features": out_features, "has_bias": has_bias}
    first, second = (linear_int8_sample(dtype, device, **given, grouped=0) for _ in range(2))
    return gated(first, second)


def gated_cost(x: Tensor, out_features: int, first: Cost, second: Cost) -> Cost:
    """Of two products of x, which is read once, whose results stay where they are but for one."""
    written = x.shape[0] * out_features
    moved = first.bytes + second.bytes - x.nbytes - written * x.element_size()
    return Cost(first.flops + second.flops + 5 * written, moved)


def gated_linear_cost(
    x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None = None, up_bias: Tensor | None = None
) -> Cost:
    return gated_cost(x, len(gate), linear_cost(x, gate, gate_bias), linear_cost(x, up, up_bias))


def gated_linear_int8_cost(
    x: Tensor, gate: Int8Weight, up: Int8Weight, gate_bias: Tensor | None = None, up_bias: Tensor | None = None
) -> Cost:
    costs = linear_int8_cost(x, gate, gate_bias), linear_int8_cost(x, up, up_bias)
    return gated_cost(x, len(gate.values), *costs)


@triton.jit
def projected_tile(
    x_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    offs_n,
    mask_n,
    tile,
    num_tokens,
    in_features,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_N, BLOCK_M] of a linear layer, as linear.py stores it: rounded to x's dtype, here in fp32."""
    dtype = x_ptr.dtype.element_ty
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in range(0, in_features, BLOCK_K):
        weight = weight_tile(
            weight_ptr, scales_ptr, offs_n, mask_n, start, in_features, dtype, 0, WHOLE, BLOCK_N, BLOCK_K
        )
        acc = dot_tile(acc, weight, x_ptr, tile, num_tokens, in_features, start, WHOLE, BLOCK_M, BLOCK_K)
    if scales_ptr is not None:
        acc *= tl.load(scales_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    bias = tl.zeros((BLOCK_N,), dtype=tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    return (acc + bias[:, None]).to(dtype).to(tl.float32)


@triton.jit
def store_gated(y_ptr, gate, up, tile, offs_n, num_tokens, out_features, BLOCK_M: tl.constexpr):
    offs_m = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = (offs_m < num_tokens)[None, :] & (offs_n < out_features)[:, None]
    at = y_ptr + offs_m[None, :] * out_features + offs_n[:, None]
    tl.store(at, gate / (1.0 + tl.exp(-gate)) * up, mask=mask)


@kernel(do_not_specialize=["num_tokens"])
def _gated_linear_kernel(
    y_ptr,  # [num_tokens, out_features]
    x_ptr,  # [num_tokens, in_features]
    gate_ptr,  # [out_features, in_features]
    up_ptr,  # [out_features, in_features]
    gate_scales_ptr,  # of int8 weights, [out_features]; else None
    up_scales_ptr,  # likewise
    gate_bias_ptr,  # [out_features] or None
    up_bias_ptr,  # [out_features] or None
    num_tokens,
    out_features,
    in_features,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Sizes, row tiles and the order of sums as in linear.py.
    tile = tl.program_id(0)
    if ROWS > 0:
        tile, num_tokens = tl.full((), 0, tl.int32), ROWS
    if WIDTH > 0:
        in_features = WIDTH
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < out_features
    gate = projected_tile(
        x_ptr,
        gate_ptr,
        gate_scales_ptr,
        gate_bias_ptr,
        offs_n,
        mask_n,
        tile,
        num_tokens,
        in_features,
        WIDTH > 0,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    up = projected_tile(
        x_ptr,
        up_ptr,
        up_scales_ptr,
        up_bias_ptr,
        offs_n,
        mask_n,
        tile,
        num_tokens,
        in_features,
        WIDTH > 0,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    store_gated(y_ptr, gate, up, tile, offs_n, num_tokens, out_features, BLOCK_M)


def _launch(
    y: Tensor,
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor] | tuple[None, None],
    biases: tuple[Tensor | None, Tensor | None],
    config: Config,
) -> None:
    (num_tokens, in_features), out_features = x.shape, len(weights[0])
    on_cpu = sizes.runs_on_cpu(x)
    options = {} if on_cpu else {"num_warps": config.num_warps, "num_stages": config.num_stages}
    _gated_linear_kernel[cdiv(num_tokens, config.block_m), cdiv(out_features, config.block_n)](
        y,
        x,
        *weights,
        *scales,
        *biases,
        num_tokens,
        out_features,
        in_features,
        config.rows,
        config.width,
        config.block_m,
        config.block_n,
        config.block_k,
        **options,
    )


@op(
    reference=gated_linear_reference,
    sample=gated_linear_sample,
    cost=gated_linear_cost,
    typical={"num_tokens": 16, "in_features": 4096, "out_features": 11008, "has_bias": 0},
)
def gated_linear(
    y: Tensor,
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> None:
    """y = swiglu(linear(x, gate, gate_bias), linear(x, up, up_bias)) of a decode batch; on the CPU the same bits."""
    on_cpu, out_features = sizes.runs_on_cpu(x), len(gate)
    config = cpu_config(*x.shape[:1], out_features, x.shape[1]) if on_cpu else decode_config(out_features, x.dtype)
    _launch(y, x, (gate, up), (None, None), (gate_bias, up_bias), config)


@op(
    reference=gated_linear_int8_reference,
    sample=gated_linear_int8_sample,
    cost=gated_linear_int8_cost,
    typical={"num_tokens": 16, "in_features": 4096, "out_features": 11008, "has_bias": 0},
)
def gated_linear_int8(
    y: Tensor,
    x: Tensor,
    gate: Int8Weight,
    up: Int8Weight,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> None:
    """As `gated_linear`, of int8 weights with a scale per row and `linear_int8`."""
    (num_tokens, in_features), out_features = x.shape, len(gate.values)
    groups = [group_size(in_features, weight) for weight in (gate, up)]
    if groups != [in_features, in_features]:
        raise ValueError(f"gate and up have scales of {groups} elements, must have one of each row of {in_features}")
    if sizes.runs_on_cpu(x):
        config = cpu_config(num_tokens, out_features, in_features)
    else:
        config = gpu_config(out_features, in_features, prefill=False, grouped=False)
    _launch(y, x, (gate.values, up.values), (gate.scales, up.scales), (gate_bias, up_bias), config)
