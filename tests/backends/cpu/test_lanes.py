"""Strides: what is known of a tile's values along each axis, and that it is true."""

import pytest
import torch
import triton
import triton.language as tl

from lychee.backends.cpu.lanes import DYNAMIC, GENERAL, Strides
from lychee.backends.cpu.order import analyse
from lychee.backends.cpu.ttir import walk
from tests.backends.cpu.stages import func_of, run

N, M = 16, 4


def stored(func):
    """(pointer, value) of each store, in order."""
    return [op.operands[:2] for op in walk(func.blocks) if op.name == "tt.store"]


@triton.jit
def pointers_kernel(p, half, long, q, n, s, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(p + i, 0.0)
    tl.store(half + i, 0.0)
    tl.store(long + i, 0)
    tl.store(p + 2 * i + n, 0.0)
    tl.store(p + (n - i), 0.0)
    tl.store(p + i * s, 0.0)
    tl.store(p + i * 0 + n, 0.0)
    tl.store(p + i.to(tl.int64) * 3, 0.0)
    tl.store(p + i + i * s, 0.0)
    tl.store(p + i * i, 0.0)
    tl.store(p + i // 2, 0.0)
    tl.store(p + i % 4, 0.0)
    tl.store(p + tl.load(q + i), 0.0)
    tl.store(p + tl.load(q + i * 0), 0.0)
    tl.store(p + tl.program_id(0) * N + i, 0.0)


def test_strides_of_pointers_are_in_bytes():
    p, half, long, q = torch.zeros(N), torch.zeros(N).half(), torch.zeros(N).long(), torch.zeros(N).int()
    func = func_of(pointers_kernel, p, half, long, q, 7, 9, N=N)
    got = [Strides().of(pointer) for pointer, _ in stored(func)]
    want = [4, 2, 8, 8, -4, DYNAMIC, 0, 12, DYNAMIC, GENERAL, GENERAL, GENERAL, GENERAL, 0, 4]
    assert got == [(stride,) for stride in want]


@triton.jit
def tiles_kernel(out, s, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M), tl.arange(0, N)
    at = out + i[:, None] * N + j[None, :]
    wide, tall = i[:, None] * 5 + j[None, :] * 3, i[:, None] * 5 + j[None, :] * 0
    tl.store(at, wide)
    tl.store(at, wide - tall)
    tl.store(at, wide * 2 + 1)
    tl.store(at, tl.trans(j[:, None] * 7 - i[None, :]))
    tl.store(at, tl.broadcast_to(i[:, None], (M, N)))
    tl.store(at, tl.reshape(tl.arange(0, M * N), (M, N)))
    tl.store(at, tl.reshape(tl.trans(wide), (M, N)))
    tl.store(at, tl.reshape(tl.broadcast_to(j[None, :], (1, N)), (1, N)) + tall)
    tl.store(at, wide * s)
    tl.store(at, wide * wide)
    tl.store(at, tl.where(tall > 5, tall, 0))
    tl.store(at, tl.maximum(wide, 7))


WANT = [
    (5, 3),
    (0, 3),
    (10, 6),
    (-1, 7),
    (1, 0),
    (N, 1),
    (GENERAL, GENERAL),
    (5, 1),
    (DYNAMIC, DYNAMIC),
    (GENERAL, GENERAL),
    (GENERAL, 0),
    (GENERAL, GENERAL),
]


def test_strides_of_matrices():
    func = func_of(tiles_kernel, torch.zeros(M, N, dtype=torch.int32), 3, M=M, N=N)
    assert [Strides().of(value) for _, value in stored(func)] == WANT


@pytest.mark.parametrize("number", range(len(WANT)))
def test_strides_are_true_of_the_values(number):
    out = torch.zeros(M, N, dtype=torch.int32)
    func = func_of(tiles_kernel, out, 3, M=M, N=N)
    block = func.blocks[0]
    stores = [op for op in block.ops if op.name == "tt.store"]
    strides = Strides().of(stores[number].operands[1])
    block.ops = [op for op in block.ops if op.name != "tt.store" or op is stores[number]]
    run(func, out, 3)
    for axis, stride in enumerate(strides):
        steps = out.diff(dim=axis)
        if isinstance(stride, int):
            assert bool((steps == stride).all())
        elif stride == DYNAMIC:
            assert len(steps.unique()) == 1


@triton.jit
def loop_kernel(p, n, s, N: tl.constexpr):
    i = tl.arange(0, N)
    steady = p + i
    strided = p + i * 2
    swapped = p + i
    other = p + i * 3
    for _ in range(n):
        tl.store(steady, 0.0)
        tl.store(strided, 0.0)
        tl.store(swapped, 0.0)
        steady += s
        strided += 2 * N
        swapped, other = other, swapped


def test_a_carried_tile_keeps_its_strides_where_a_trip_adds_one_number_to_all_of_it():
    func = func_of(loop_kernel, torch.zeros(N), 5, 6, N=N)
    strides = analyse(func).strides
    assert [strides.of(pointer) for pointer, _ in stored(func)] == [(4,), (8,), (GENERAL,)]
