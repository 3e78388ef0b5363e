"""Steps shared by the attention kernels: load a tile of the paged cache, fold it into a softmax."""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


def check_window(op: str, window: int) -> None:
    """Raise ValueError for a window that is no number of positions; 0 is none."""
    if window < 0:
        raise ValueError(f"{op}: window is {window}, must be at least 0")


def window_start(position: int, window: int) -> int:
    """The first position that a row at `position` sees."""
    return max(0, position + 1 - window) if window else 0


@triton.jit
def fold_tile(
    running_max,  # fp32 [BLOCK_M], in units of log2
    running_sum,  # fp32 [BLOCK_M]
    acc,  # fp32 [BLOCK_M, BLOCK_D]
    q,  # [BLOCK_M, BLOCK_D]
    k,  # [TILE, BLOCK_D]
    v,  # [TILE, BLOCK_D]
    scale_log2,
    visible,  # bool, broadcasts to [BLOCK_M, TILE]; None for all of them; by now every row has seen a key
):
    """One step of online softmax (arXiv:2205.14135). fma by name, so that no compiler chooses where to contract."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(scores, axis=1) * scale_log2)
    shrink = tl.exp2(running_max - new_max)
    probs = tl.exp2(tl.fma(scores, scale_log2, -new_max[:, None]))
    running_sum = tl.fma(running_sum, shrink, tl.sum(probs, axis=1))
    acc = tl.dot(probs.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_max, running_sum, acc


@triton.jit
def merge_states(total_max, total_sum, total, running_max, running_sum, acc):
    """Two states of a row's keys as one; the first may be empty (-inf, 0, 0)."""
    new_max = tl.maximum(total_max, running_max)
    shrink = tl.exp2(total_max - new_max)
    weight = tl.exp2(running_max - new_max)
    total_sum = tl.fma(total_sum, shrink, running_sum * weight)
    total = tl.fma(total, tl.broadcast_to(shrink[:, None], total.shape), acc * weight[:, None])
    return new_max, total_sum, total


@triton.jit
def load_tile(
    cache_ptr,  # [num_slots, num_kv_heads, cache_width]
    slots,  # int64 [TILE]
    head_idx,
    num_kv_heads,
    head_dim,
    cache_width,
    DTYPE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Keys or values of a tile [TILE, BLOCK_D], 0 past head_dim."""
    offs_d = tl.arange(0, BLOCK_D)
    mask = (offs_d < head_dim)[None, :]
    rows = slots * (num_kv_heads * cache_width) + head_idx * head_dim
    tile = tl.load(cache_ptr + rows[:, None] + offs_d[None, :], mask=mask, other=0.0)
    if cache_ptr.dtype.element_ty == tl.int8:
        scales_at = tl.cdiv(num_kv_heads * head_dim, 4) * 4 + head_idx * 4
        scales_ptr = (cache_ptr + scales_at).to(tl.pointer_type(tl.float32), bitcast=True)
        scales = tl.load(scales_ptr + slots * (num_kv_heads * cache_width // 4))
        tile = (tile.to(tl.float32) * scales[:, None]).to(DTYPE)
    return tile
