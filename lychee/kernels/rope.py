"""Rotary position embedding (arXiv:2104.09864) of queries and keys, fused with the write into the paged KV cache."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernel import kernel
from .kv_int8 import cache_width, check_cache, packed_rows
from .op import op
from .sizes import next_power_of_2
from .types import Cost, Keys, KVCacheWritten, Positions, Queries, RopeTable, SlotMapping, Values


def rotate_reference(x: Tensor, angles: Tensor) -> Tensor:
    """x [num_tokens, heads, head_dim] rotated by angles [num_tokens, head_dim]: cosines, then sines."""
    cos, sin = angles.unsqueeze(1).chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def rope_store_reference(
    q: Queries,
    k: Keys,
    v: Values,
    k_cache: KVCacheWritten,
    v_cache: KVCacheWritten,
    rope_table: RopeTable,
    positions: Positions,
    slot_mapping: SlotMapping,
) -> Queries:
    angles = rope_table[positions]
    stored = slot_mapping >= 0
    slots = slot_mapping[stored]
    pack = packed_rows if k_cache.dtype is torch.int8 else lambda x: x
    k_cache[slots] = pack(rotate_reference(k, angles)[stored])
    v_cache[slots] = pack(v[stored])
    return rotate_reference(q, angles)


def rope_store_sample(
    dtype: torch.dtype,
    device: str,
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_slots: int,
    num_positions: int,
    int8_cache: int = 0,
) -> dict[str, Any]:
    head_dim += head_dim % 2
    cache_dtype = torch.int8 if int8_cache else dtype
    width = cache_width(num_kv_heads, head_dim, cache_dtype)
    num_slots = max(num_slots, num_tokens)
    slot_mapping = torch.randperm(num_slots, device=device)[:num_tokens].to(torch.int32)
    slot_mapping[torch.rand(num_tokens, device=device) < 0.2] = -1
    angles = torch.rand(num_positions, head_dim // 2, device=device) * 6.2831853
    heads = {"q": num_heads, "k": num_kv_heads, "v": num_kv_heads}
    caches = ("k_cache", "v_cache")
    return {
        **{key: torch.randn(num_tokens, n, head_dim, dtype=dtype, device=device) for key, n in heads.items()},
        **{key: torch.zeros(num_slots, num_kv_heads, width, dtype=cache_dtype, device=device) for key in caches},
        "rope_table": torch.cat([angles.cos(), angles.sin()], dim=-1),
        "positions": torch.randint(num_positions, (num_tokens,), dtype=torch.int32, device=device),
        "slot_mapping": slot_mapping,
    }


def rope_store_cost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rope_table: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
) -> Cost:
    stored = len(k) * k_cache.shape[1] * k_cache.shape[2] * k_cache.element_size()
    moved = 2 * q.nbytes + k.nbytes + v.nbytes + 2 * stored
    return Cost(flops=3 * (q.numel() + k.numel()), bytes=moved + positions.numel() * (8 + 4 * rope_table.shape[1]))


@triton.jit
def _rotated(x_ptr, cos, sin, offs_d, half, mask_d):
    first = tl.load(x_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + half + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _store_halves(y_ptr, first, second, offs_d, half, mask_d):
    tl.store(y_ptr + offs_d, first, mask=mask_d)
    tl.store(y_ptr + half + offs_d, second, mask=mask_d)


@triton.jit
def _store_cached(cache_ptr, slot, kv_head, first, second, num_kv_heads, head_dim, cache_width, offs_d, half, mask_d):
    """A head's row into its slot; int8 as kv_int8.py says."""
    slot_ptr = cache_ptr + slot * num_kv_heads * cache_width
    if cache_ptr.dtype.element_ty == tl.int8:
        first, second = first.to(tl.float32), second.to(tl.float32)
        largest = tl.max(tl.where(mask_d, tl.maximum(tl.abs(first), tl.abs(second)), 0.0), axis=0)
        inverse = tl.where(largest > 0, tl.div_rn(127.0, largest), 0.0)
        first, second = tl.floor(first * inverse + 0.5).to(tl.int8), tl.floor(second * inverse + 0.5).to(tl.int8)
        scales_at = slot_ptr + tl.cdiv(num_kv_heads * head_dim, 4) * 4 + kv_head * 4
        scale_ptr = scales_at.to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(scale_ptr, tl.div_rn(largest, 127.0), mask=slot >= 0)
    _store_halves(slot_ptr + kv_head * head_dim, first, second, offs_d, half, mask_d)


@kernel
def _rope_store_kernel(
    y_ptr,  # [num_tokens, num_heads, head_dim]
    q_ptr,  # [num_tokens, num_heads, head_dim]
    k_ptr,  # [num_tokens, num_kv_heads, head_dim]
    v_ptr,  # [num_tokens, num_kv_heads, head_dim]
    k_cache_ptr,  # [num_slots, num_kv_heads, cache_width]
    v_cache_ptr,  # [num_slots, num_kv_heads, cache_width]
    rope_table_ptr,  # [num_positions, head_dim]
    positions_ptr,  # [num_tokens]
    slot_mapping_ptr,  # [num_tokens]
    num_heads,
    num_kv_heads,
    head_dim,
    cache_width,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = head_dim // 2
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < half
    angle_ptr = rope_table_ptr + tl.load(positions_ptr + token).to(tl.int64) * head_dim
    cos = tl.load(angle_ptr + offs_d, mask=mask_d, other=0.0)
    sin = tl.load(angle_ptr + half + offs_d, mask=mask_d, other=0.0)
    if head < num_heads:
        row = (token * num_heads + head) * head_dim
        first, second = _rotated(q_ptr + row, cos, sin, offs_d, half, mask_d)
        _store_halves(y_ptr + row, first, second, offs_d, half, mask_d)
    else:
        kv_head = head - num_heads
        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
        row = (token * num_kv_heads + kv_head) * head_dim
        mask_d = mask_d & (slot >= 0)
        key_first, key_second = _rotated(k_ptr + row, cos, sin, offs_d, half, mask_d)
        # Rounded to what the row is in before any scale is taken, as an unfused rotation would be.
        key_first, key_second = key_first.to(k_ptr.dtype.element_ty), key_second.to(k_ptr.dtype.element_ty)
        _store_cached(
            k_cache_ptr,
            slot,
            kv_head,
            key_first,
            key_second,
            num_kv_heads,
            head_dim,
            cache_width,
            offs_d,
            half,
            mask_d,
        )
        value_first = tl.load(v_ptr + row + offs_d, mask=mask_d, other=0.0)
        value_second = tl.load(v_ptr + row + half + offs_d, mask=mask_d, other=0.0)
        _store_cached(
            v_cache_ptr,
            slot,
            kv_head,
            value_first,
            value_second,
            num_kv_heads,
            head_dim,
            cache_width,
            offs_d,
            half,
            mask_d,
        )


@op(
    reference=rope_store_reference,
    sample=rope_store_sample,
    cost=rope_store_cost,
    typical={
        "num_tokens": 16,
        "num_heads": 32,
        "num_kv_heads": 32,
        "head_dim": 128,
        "num_slots": 4096,
        "num_positions": 4096,
        "int8_cache": 0,
    },
)
def rope_store(
    y: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rope_table: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
) -> None:
    """y = q rotated; k rotated and v are written at slot_mapping, where -1 stores nothing. Angles and products in fp32.

    head_dim is even and dimension i pairs with i + head_dim/2 ("rotate half"). Slots other than -1 are distinct.
    One program per token and head.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    check_cache("rope_store", k, num_kv_heads, head_dim, k_cache)
    _rope_store_kernel[(num_tokens, num_heads + num_kv_heads)](
        y,
        q,
        k,
        v,
        k_cache,
        v_cache,
        rope_table,
        positions,
        slot_mapping,
        num_heads,
        num_kv_heads,
        head_dim,
        k_cache.shape[2],
        BLOCK_D=next_power_of_2(head_dim // 2),
        num_warps=1,
    )
