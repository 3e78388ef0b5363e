"""Kernels written after Triton's tutorials: vector add, fused softmax, matmul, dropout, layer norm, flash attention."""

import triton
import triton.language as tl


@triton.jit
def vector_add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)


@triton.jit
def fused_softmax(out_ptr, in_ptr, in_stride, out_stride, rows, columns, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    first = tl.program_id(0)
    step = tl.num_programs(0)
    for row in tl.range(first, rows, step, num_stages=STAGES):
        offsets = tl.arange(0, BLOCK)
        mask = offsets < columns
        x = tl.load(in_ptr + row * in_stride + offsets, mask=mask, other=-float("inf")).to(tl.float32)
        numerator = tl.exp(x - tl.max(x, axis=0))
        y = numerator / tl.sum(numerator, axis=0)
        tl.store(out_ptr + row * out_stride + offsets, y, mask=mask)


@triton.jit
def leaky_relu(x):
    return tl.where(x >= 0, x, 0.01 * x)


@triton.jit
def matmul(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Programs are ordered in groups of rows; rows and columns wrap around instead of being masked on loads."""
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    per_group = GROUP_M * tiles_n
    group = pid // per_group
    first_m = group * GROUP_M
    group_rows = min(tiles_m - first_m, GROUP_M)
    pid_m = first_m + ((pid % per_group) % group_rows)
    pid_n = (pid % per_group) // group_rows
    tl.assume(pid_m >= 0)
    tl.assume(pid_n >= 0)
    rows = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    columns = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    inner = tl.arange(0, BLOCK_K)
    a = a_ptr + rows[:, None] * stride_am + inner[None, :] * stride_ak
    b = b_ptr + inner[:, None] * stride_bk + columns[None, :] * stride_bn
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(tl.cdiv(K, BLOCK_K)):
        left = K - k * BLOCK_K
        x = tl.load(a, mask=inner[None, :] < left, other=0.0)
        y = tl.load(b, mask=inner[:, None] < left, other=0.0)
        total = tl.dot(x, y, total, input_precision="ieee")
        a += BLOCK_K * stride_ak
        b += BLOCK_K * stride_bk
    if ACTIVATION == "leaky_relu":
        total = leaky_relu(total)
    c = total.to(c_ptr.dtype.element_ty)
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    where = c_ptr + stride_cm * rows[:, None] + stride_cn * columns[None, :]
    tl.store(where, c, mask=(rows[:, None] < M) & (columns[None, :] < N))


@triton.jit
def persistent_matmul(
    a_ptr, b_ptr, c_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Each program walks over output tiles; b is (N, K). Everything is masked."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(M, BLOCK_M) * tiles_n
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        rows = (tile // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = (tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            inner = k + tl.arange(0, BLOCK_K)
            x_mask = (rows[:, None] < M) & (inner[None, :] < K)
            y_mask = (columns[:, None] < N) & (inner[None, :] < K)
            x = tl.load(a_ptr + rows[:, None] * K + inner[None, :], mask=x_mask, other=0.0)
            y = tl.load(b_ptr + columns[:, None] * K + inner[None, :], mask=y_mask, other=0.0)
            total += tl.dot(x, y.T, input_precision="ieee")
        where = c_ptr + rows[:, None] * N + columns[None, :]
        tl.store(where, total.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (columns[None, :] < N))


@triton.jit
def dropout(x_ptr, keep_ptr, out_ptr, n, p, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    keep = tl.load(keep_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, tl.where(keep, x / (1 - p), 0.0), mask=mask)


@triton.jit
def seeded_dropout(x_ptr, out_ptr, n, p, seed, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    keep = tl.rand(seed, offsets) > p
    tl.store(out_ptr + offsets, tl.where(keep, x / (1 - p), 0.0), mask=mask)


@triton.jit
def layer_norm(x_ptr, y_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, stride, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    y_ptr += row * stride
    x_ptr += row * stride
    partial = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        partial += tl.load(x_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
    mean = tl.sum(partial, axis=0) / N
    partial = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
        x = tl.where(columns < N, x - mean, 0.0)
        partial += x * x
    rstd = 1 / tl.sqrt(tl.sum(partial, axis=0) / N + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < N
        w = tl.load(w_ptr + columns, mask=mask)
        b = tl.load(b_ptr + columns, mask=mask)
        x = tl.load(x_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + columns, (x - mean) * rstd * w + b, mask=mask)


@triton.jit
def layer_norm_backward_dx(
    dx_ptr,
    dy_ptr,
    dw_ptr,
    db_ptr,
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    lock_ptr,
    stride,
    N,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Also adds this row's part of dw and db to one of GROUP rows of partial sums, under a spin lock."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < N
    lock_id = row % GROUP
    lock_ptr += lock_id
    count_ptr = lock_ptr + GROUP
    dw_at = dw_ptr + lock_id * N + columns
    db_at = db_ptr + lock_id * N + columns
    x = tl.load(x_ptr + row * stride + columns, mask=mask, other=0).to(tl.float32)
    dy = tl.load(dy_ptr + row * stride + columns, mask=mask, other=0).to(tl.float32)
    w = tl.load(w_ptr + columns, mask=mask).to(tl.float32)
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    normed = tl.where(mask, (x - mean) * rstd, 0.0)
    wdy = tl.where(mask, w * dy, 0.0)
    c1 = tl.sum(normed * wdy, axis=0) / N
    c2 = tl.sum(wdy, axis=0) / N
    dx = (wdy - (normed * c1 + c2)) * rstd
    tl.store(dx_ptr + row * stride + columns, dx, mask=mask)
    partial_dw = (dy * normed).to(dw_ptr.dtype.element_ty)
    partial_db = dy.to(db_ptr.dtype.element_ty)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    count = tl.load(count_ptr)
    if count == 0:
        tl.atomic_xchg(count_ptr, 1)
    else:
        partial_dw += tl.load(dw_at, mask=mask)
        partial_db += tl.load(db_at, mask=mask)
    tl.store(dw_at, partial_dw, mask=mask)
    tl.store(db_at, partial_db, mask=mask)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


@triton.jit
def layer_norm_backward_dwdb(
    dw_ptr, db_ptr, final_dw_ptr, final_db_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dw = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, M, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        mask = (rows[:, None] < M) & (columns[None, :] < N)
        offsets = rows[:, None] * N + columns[None, :]
        dw += tl.load(dw_ptr + offsets, mask=mask, other=0.0)
        db += tl.load(db_ptr + offsets, mask=mask, other=0.0)
    tl.store(final_dw_ptr + columns, tl.sum(dw, axis=0), mask=columns < N)
    tl.store(final_db_ptr + columns, tl.sum(db, axis=0), mask=columns < N)


@triton.jit
def attention_inner(
    acc,
    total,
    peak,
    q,
    k_ptr,
    v_ptr,
    first,
    last,
    rows,
    keys,
    scale,
    HEAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, HEAD)
    for start in range(first, last, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        at = start + columns
        k = tl.load(k_ptr + at[None, :] * HEAD + dims[:, None], mask=at[None, :] < keys, other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if MASKED:
            scores = tl.where((rows[:, None] >= at[None, :]) & (at[None, :] < keys), scores, -1.0e6)
        else:
            scores = tl.where(at[None, :] < keys, scores, -1.0e6)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        p = tl.math.exp2(scores - new_peak[:, None])
        alpha = tl.math.exp2(peak - new_peak)
        v = tl.load(v_ptr + at[:, None] * HEAD + dims[None, :], mask=at[:, None] < keys, other=0.0)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        total = total * alpha + tl.sum(p, 1)
        peak = new_peak
    return acc, total, peak


@triton.jit
def flash_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    lse_ptr,
    out_ptr,
    scale,
    keys,
    HEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Contiguous (batch * heads, keys, HEAD); the causal diagonal runs as a second pass over masked blocks."""
    start = tl.program_id(0)
    base = tl.program_id(1).to(tl.int64) * keys * HEAD
    rows = start * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD)
    inside = rows[:, None] < keys
    q = tl.load(q_ptr + base + rows[:, None] * HEAD + dims[None, :], mask=inside, other=0.0)
    peak = tl.zeros([BLOCK_M], dtype=tl.float32) - float("inf")
    total = tl.zeros([BLOCK_M], dtype=tl.float32) + 1.0
    acc = tl.zeros([BLOCK_M, HEAD], dtype=tl.float32)
    log2_scale = scale * 1.4426950408889634
    k_ptr += base
    v_ptr += base
    if CAUSAL:
        diagonal = start * BLOCK_M
        acc, total, peak = attention_inner(
            acc, total, peak, q, k_ptr, v_ptr, 0, diagonal, rows, keys, log2_scale, HEAD, BLOCK_N, False
        )
        acc, total, peak = attention_inner(
            acc, total, peak, q, k_ptr, v_ptr, diagonal, diagonal + BLOCK_M, rows, keys, log2_scale, HEAD, BLOCK_N, True
        )
    else:
        acc, total, peak = attention_inner(
            acc, total, peak, q, k_ptr, v_ptr, 0, keys, rows, keys, log2_scale, HEAD, BLOCK_N, False
        )
    tl.store(lse_ptr + tl.program_id(1) * keys + rows, peak + tl.math.log2(total), mask=rows < keys)
    acc = acc / total[:, None]
    where = out_ptr + base + rows[:, None] * HEAD + dims[None, :]
    tl.store(where, acc.to(out_ptr.dtype.element_ty), mask=inside)
