"""Cases for the kernels after Triton's tutorials: ragged sizes, between inaccessible pages, against torch."""

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from tests.backends.cpu import tutorial_kernels as kernels
from tests.backends.cpu.cases import EPSILON, FLOATS, Case, Check
from tests.backends.cpu.memory import guard
from tests.backends.cpu.philox_reference import uniform


def vector_add(dtype: torch.dtype) -> Iterator[Check]:
    for n in (1, 31, 128, 1000):
        x, y, out = guard(torch.randn(n).to(dtype), torch.randn(n).to(dtype), torch.zeros(n, dtype=dtype))
        kernels.vector_add[(triton.cdiv(n, 128),)](x, y, out, n, BLOCK=128)
        yield Check(f"{n} elements", out, x + y, 0.0)


def fused_softmax(dtype: torch.dtype) -> Iterator[Check]:
    for rows, columns in ((7, 33), (3, 128), (1, 1)):
        block = triton.next_power_of_2(columns)
        x = guard(torch.randn(rows, columns + 2).to(dtype))[0]
        (out,) = guard(torch.zeros(rows, columns, dtype=dtype))
        kernels.fused_softmax[(2,)](out, x, columns + 2, columns, rows, columns, block, 2)
        yield Check(f"{rows}x{columns}", out, torch.softmax(x[:, :columns].float(), 1).to(dtype))


def _product(a: Tensor, b: Tensor, activation: str) -> Tensor:
    c = a.float() @ b.float()
    return (torch.where(c >= 0, c, 0.01 * c) if activation else c).to(a.dtype)


def matmul(dtype: torch.dtype) -> Iterator[Check]:
    """Sizes that no block divides, transposed operands, and few rows."""
    for m, n, k, activation in ((50, 45, 70, "leaky_relu"), (1, 64, 128, ""), (33, 17, 5, ""), (64, 64, 64, "")):
        for transposed in (False, True):
            a = guard(torch.randn(m, k).to(dtype))[0]
            b = guard(torch.randn(n, k).to(dtype))[0].T if transposed else guard(torch.randn(k, n).to(dtype))[0]
            (c,) = guard(torch.zeros(m, n, dtype=dtype))
            grid = (triton.cdiv(m, 16) * triton.cdiv(n, 32),)
            kernels.matmul[grid](a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride(), 16, 32, 16, 2, activation)
            yield Check(f"{m}x{n}x{k} {activation}", c, _product(a, b, activation), 3 * EPSILON[dtype])


def persistent_matmul(dtype: torch.dtype) -> Iterator[Check]:
    for m, n, k in ((1, 40, 33), (5, 64, 64), (40, 33, 96)):
        a, b, c = guard(torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), torch.zeros(m, n, dtype=dtype))
        kernels.persistent_matmul[(3,)](a, b, c, m, n, k, 8, 16, 32)
        yield Check(f"{m}x{n}x{k}", c, _product(a, b.T, ""), 3 * EPSILON[dtype])


def dropout(dtype: torch.dtype) -> Iterator[Check]:
    n = 300
    x, keep, out = guard(torch.randn(n).to(dtype), torch.rand(n) > 0.5, torch.zeros(n, dtype=dtype))
    kernels.dropout[(triton.cdiv(n, 64),)](x, keep, out, n, 0.25, BLOCK=64)
    yield Check("kept and dropped", out, torch.where(keep, x.float() / 0.75, 0.0).to(dtype))


def seeded_dropout(dtype: torch.dtype) -> Iterator[Check]:
    n = 1000
    for seed in (0, 123, 2**40 + 7):
        x, out = guard(torch.randn(n).to(dtype), torch.zeros(n, dtype=dtype))
        kernels.seeded_dropout[(triton.cdiv(n, 256),)](x, out, n, 0.5, seed, BLOCK=256)
        keep = uniform(seed, torch.arange(n)) > 0.5
        yield Check(f"seed {seed}", out, torch.where(keep, x.float() / 0.5, 0.0).to(dtype))


def layer_norm(dtype: torch.dtype) -> Iterator[Check]:
    for rows, columns in ((4, 100), (3, 64), (2, 1)):
        x, y = guard(torch.randn(rows, columns).to(dtype) * 2 + 1, torch.zeros(rows, columns, dtype=dtype))
        w, b = guard(torch.rand(columns).to(dtype), torch.rand(columns).to(dtype))
        mean, rstd = guard(torch.zeros(rows), torch.zeros(rows))
        kernels.layer_norm[(rows,)](x, y, w, b, mean, rstd, columns, columns, 1e-5, BLOCK=32)
        want = torch.nn.functional.layer_norm(x.float(), (columns,), w.float(), b.float(), 1e-5)
        yield Check(f"y {rows}x{columns}", y, want.to(dtype))
        yield Check("mean", mean, x.float().mean(1))
        yield Check("rstd", rstd, (x.float().var(1, correction=0) + 1e-5).rsqrt(), 1e-4)


def layer_norm_backward(dtype: torch.dtype) -> Iterator[Check]:
    for rows, columns, groups in ((13, 50, 4), (5, 64, 1)):
        x = torch.randn(rows, columns).to(dtype).float().requires_grad_()
        w, b = (torch.rand(columns).to(dtype).float().requires_grad_() for _ in range(2))
        upstream = torch.randn(rows, columns).to(dtype).float()
        torch.nn.functional.layer_norm(x, (columns,), w, b, 1e-5).backward(upstream)
        detached = x.detach()
        mean, rstd = detached.mean(1), (detached.var(1, correction=0) + 1e-5).rsqrt()
        args = guard(upstream.to(dtype), torch.zeros(groups, columns), torch.zeros(groups, columns))
        (dx, *more) = guard(torch.zeros(rows, columns, dtype=dtype), detached.to(dtype), w.detach().to(dtype))
        (locks,) = guard(torch.zeros(2 * groups, dtype=torch.int32))
        statistics = guard(mean, rstd)
        block = triton.next_power_of_2(columns)
        kernels.layer_norm_backward_dx[(rows,)](dx, *args, *more, *statistics, locks, columns, columns, groups, block)
        final = guard(torch.zeros(columns), torch.zeros(columns))
        grid = (triton.cdiv(columns, 16),)
        kernels.layer_norm_backward_dwdb[grid](*args[1:], *final, min(groups, rows), columns, 2, 16)
        assert x.grad is not None
        yield Check("dx", dx, x.grad.to(dtype), 4 * EPSILON[dtype])
        yield Check("dw", final[0], w.grad, 8 * EPSILON[dtype])
        yield Check("db", final[1], b.grad, 8 * EPSILON[dtype])
        yield Check("locks released", locks[:groups], torch.zeros(groups, dtype=torch.int32))


def flash_attention(dtype: torch.dtype) -> Iterator[Check]:
    for causal in (True, False):
        for heads, keys, head in ((2, 48, 32), (1, 37, 16)):
            q, k, v = guard(*(torch.randn(heads, keys, head).to(dtype) for _ in range(3)))
            out, lse = guard(torch.zeros(heads, keys, head, dtype=dtype), torch.zeros(heads, keys))
            grid = (triton.cdiv(keys, 16), heads)
            kernels.flash_attention[grid](q, k, v, lse, out, 0.3, keys, head, 16, 8, causal)
            scores = 0.3 * q.float() @ k.float().mT
            if causal:
                scores = scores.masked_fill(torch.ones(keys, keys).triu(1) > 0, -torch.inf)
            yield Check(f"causal={causal}", out, (scores.softmax(-1) @ v.float()).to(dtype), 2 * EPSILON[dtype])
            want = torch.logsumexp(scores, -1) / torch.log(torch.tensor(2.0))
            yield Check("log-sum-exp", lse, want, 2 * EPSILON[dtype])


CASES = tuple(
    Case(checks, FLOATS)
    for checks in (
        vector_add,
        fused_softmax,
        matmul,
        persistent_matmul,
        dropout,
        seeded_dropout,
        layer_norm,
        layer_norm_backward,
        flash_attention,
    )
)
