"""The int8 KV cache: what a slot holds, written and read in torch.

A slot is `num_kv_heads * width` bytes: every head's values, then every head's fp32 scale, then padding to 16 bytes. A
value is int8 times its head's scale. So whatever moves a slot moves its scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127.0


def cache_width(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Elements per head and slot of a cache of that dtype."""
    if dtype is not torch.int8:
        return head_dim
    width = -(-(_scales_at(num_kv_heads, head_dim) + 4 * num_kv_heads) // num_kv_heads)
    while width * num_kv_heads % 16:
        width += 1
    return width


def check_cache(op: str, x: Tensor, num_kv_heads: int, head_dim: int, cache: Tensor) -> None:
    """Raise ValueError where a cache is not of x's dtype or int8, or has another width than its dtype wants."""
    if cache.dtype is not x.dtype and cache.dtype is not torch.int8:
        raise ValueError(f"{op}: the cache is {cache.dtype}, must be {x.dtype} as the rows, or int8")
    if cache.shape[2] != (width := cache_width(num_kv_heads, head_dim, cache.dtype)):
        raise ValueError(f"{op}: the cache has {cache.shape[2]} elements per head, must have {width}")


def packed_rows(x: Tensor) -> Tensor:
    """x [num_rows, num_kv_heads, head_dim] as slots, int8 [num_rows, num_kv_heads, width]."""
    num_rows, num_kv_heads, head_dim = x.shape
    width, start = cache_width(num_kv_heads, head_dim, torch.int8), _scales_at(num_kv_heads, head_dim)
    largest = x.float().abs().amax(-1)
    quants = x.float() * torch.where(largest > 0, LARGEST / largest, 0.0)[..., None]
    slots = torch.zeros(num_rows, num_kv_heads * width, dtype=torch.int8, device=x.device)
    slots[:, : num_kv_heads * head_dim] = (quants + 0.5).floor().to(torch.int8).flatten(1)
    scales = (largest / LARGEST).flatten().view(torch.int8)
    slots[:, start : start + 4 * num_kv_heads] = scales.view(num_rows, 4 * num_kv_heads)
    return slots.view(num_rows, num_kv_heads, width)


def cached_rows(cache: Tensor, slots: Tensor, head_dim: int) -> Tensor:
    """fp32 rows of a cache of any dtype, [*slots.shape, num_kv_heads, head_dim]."""
    rows = cache[slots]
    if cache.dtype is not torch.int8:
        return rows.float()
    num_kv_heads = cache.shape[1]
    flat, start = rows.flatten(-2), _scales_at(num_kv_heads, head_dim)
    values = flat[..., : num_kv_heads * head_dim].unflatten(-1, (num_kv_heads, head_dim)).float()
    scales = flat[..., start : start + 4 * num_kv_heads].contiguous().view(torch.float32)
    return torch.mul(values, scales[..., None])


def _scales_at(num_kv_heads: int, head_dim: int) -> int:
    return -(-num_kv_heads * head_dim // 4) * 4
