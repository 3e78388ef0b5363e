"""What is held in a buffer, and why. Every hazard gives the right result, and a wrong one once its rule is dropped."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from lychee.backends.cpu import order
from tests.backends.cpu.stages import func_of, run

N = 64


def ramp() -> Tensor:
    return torch.arange(float(N))


def pair() -> tuple[Tensor, Tensor]:
    return ramp(), torch.zeros(N)


def overlapping() -> tuple[Tensor, Tensor]:
    memory = torch.cat([ramp(), torch.zeros(1)])
    return memory[:N], memory[1:]


def one_memory_twice() -> tuple[Tensor, Tensor, Tensor]:
    p, q = pair()
    return p, q, p


@triton.jit
def store_between_kernel(p, q, N: tl.constexpr):
    o = tl.arange(0, N)
    x = tl.load(p + o)
    tl.store(p + o, 0.0)
    tl.store(q + o, x + 1)


@triton.jit
def atomic_between_kernel(p, q, N: tl.constexpr):
    o = tl.arange(0, N)
    x = tl.load(p + o)
    tl.atomic_add(p + o, -x)
    tl.store(q + o, x + 1)


@triton.jit
def other_name_kernel(p, q, also_p, N: tl.constexpr):
    o = tl.arange(0, N)
    x = tl.load(p + o)
    tl.store(also_p + o, 0.0)
    tl.store(q + o, x + 1)


@triton.jit
def branch_between_kernel(p, q, flag, N: tl.constexpr):
    o = tl.arange(0, N)
    x = tl.load(p + o)
    if flag > 1:
        tl.store(p + o, 0.0)
    tl.store(q + o, x + 1)


@triton.jit
def later_branch_kernel(p, q, flag, N: tl.constexpr):
    o = tl.arange(0, N)
    x = tl.load(p + o)
    tl.store(p + o, 0.0)
    if flag > 1:
        tl.store(q + o, x + 1)


@triton.jit
def early_return_kernel(p, q, flag, N: tl.constexpr):
    o = tl.arange(0, N)
    x = tl.load(p + o)
    tl.store(p + o, 0.0)
    if flag < 1:
        return
    tl.store(q + o, x + 1)


@triton.jit
def loop_after_kernel(p, q, trips, N: tl.constexpr):
    """The second trip's use comes after the first trip's store."""
    o = tl.arange(0, N)
    x = tl.load(p + o)
    for i in range(trips):
        tl.store(q + o, x + i)
        tl.store(p + o, 0.0)


@triton.jit
def carried_kernel(p, q, trips, N: tl.constexpr):
    """What one trip loads before its store the next one uses."""
    o = tl.arange(0, N)
    x = tl.zeros((N,), tl.float32)
    for _ in range(trips):
        following = tl.load(p + o)
        tl.store(p + o, 0.0)
        tl.store(q + o, x + 1)
        x = following


@triton.jit
def while_kernel(p, q, trips, N: tl.constexpr):
    o = tl.arange(0, N)
    x = tl.load(p + o)
    while trips > 0:
        tl.store(q + o, x + trips)
        tl.store(p + o, 0.0)
        trips -= 1


@triton.jit
def address_kernel(p, q, where, N: tl.constexpr):
    """The load's own pointer reads memory that is overwritten."""
    o = tl.arange(0, N)
    i = tl.load(where + o)
    tl.store(where + o, 0)
    tl.store(q + o, tl.load(p + i) + 1)


@triton.jit
def mask_kernel(p, q, flags, N: tl.constexpr):
    o = tl.arange(0, N)
    m = tl.load(flags + o) != 0
    tl.store(flags + o, 0)
    tl.store(q + o, tl.load(p + o) + 1, mask=m & (o < N - 1))


@triton.jit
def dot_kernel(p, q, B: tl.constexpr):
    o = tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :]
    x = tl.load(p + o)
    tl.store(p + o, 0.0)
    tl.store(q + o, tl.dot(x, (o // B == o % B).to(tl.float32), input_precision="ieee") + 1)


@triton.jit
def reduce_kernel(p, q, N: tl.constexpr):
    o = tl.arange(0, N)
    x = tl.load(p + o)
    tl.store(p + o, 0.0)
    tl.store(q + o, x * 0 + tl.sum(x, 0) - 1951)


@triton.jit
def shift_kernel(p, q, N: tl.constexpr):
    """q is p, one element on: the store of one element overwrites what the next one reads."""
    o = tl.arange(0, N)
    tl.store(q + o, tl.load(p + o) * 2)


@triton.jit
def transpose_in_place_kernel(p, B: tl.constexpr):
    i, j = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    tl.store(p + i * B + j, tl.load(p + j * B + i))


@triton.jit
def reverse_in_place_kernel(p, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(p + o, tl.gather(tl.load(p + o), N - 1 - o, 0))


@triton.jit
def other_mask_kernel(p, N: tl.constexpr):
    """The mask reads what the store writes."""
    o = tl.arange(0, N)
    tl.store(p + o, 5.0, mask=tl.load(p + (N - 1 - o)) > 0)


@triton.jit
def induction_kernel(p, q, where, trips, N: tl.constexpr):
    """Every trip adds one to indices that were read before the loop."""
    o = tl.arange(0, N)
    i = tl.load(where + o)
    for _ in range(trips):
        tl.store(q + o, tl.load(p + i) + 1)
        tl.store(where + o, 0)
        i += 1


def _unwritten(*_: Any) -> bool:
    return False


def _nothing(*_: Any) -> None:
    pass


BETWEEN = ("_Positions.written_between", _unwritten)
OVERWRITES = ("_Analysis.overwrites", _nothing)
INDUCTION = ("_Analysis.carried", _nothing)


@dataclass(frozen=True)
class Hazard:
    """`arguments` makes fresh ones; the one at `result` becomes `want`, and something else without the rule."""

    kernel: Any
    arguments: Callable[[], tuple[Any, ...]]
    want: Tensor
    rule: tuple[str, Any] = BETWEEN
    result: int = 1
    size: tuple[str, int] = ("N", N)

    def run(self) -> Tensor:
        arguments = self.arguments()
        run(func_of(self.kernel, *arguments, **dict([self.size])), *arguments)
        return arguments[self.result]


NEXT = ramp() + 1
BACKWARDS = torch.arange(N - 1, -1, -1, dtype=torch.int32)
UP = BACKWARDS.clamp(min=2)
HAZARDS = [
    Hazard(store_between_kernel, pair, NEXT),
    Hazard(atomic_between_kernel, pair, NEXT),
    Hazard(other_name_kernel, one_memory_twice, NEXT),
    Hazard(branch_between_kernel, lambda: (*pair(), 5), NEXT),
    Hazard(later_branch_kernel, lambda: (*pair(), 5), NEXT),
    Hazard(early_return_kernel, lambda: (*pair(), 5), NEXT),
    Hazard(loop_after_kernel, lambda: (*pair(), 2), NEXT),
    Hazard(carried_kernel, lambda: (*pair(), 2), NEXT),
    Hazard(while_kernel, lambda: (*pair(), 3), NEXT),
    Hazard(address_kernel, lambda: (*pair(), BACKWARDS.clone()), NEXT.flip(0)),
    Hazard(mask_kernel, lambda: (*pair(), BACKWARDS % 3), NEXT * (BACKWARDS % 3 > 0) * (ramp() < N - 1)),
    Hazard(dot_kernel, pair, NEXT, size=("B", 8)),
    Hazard(reduce_kernel, pair, torch.full((N,), 65.0)),
    Hazard(shift_kernel, overlapping, ramp() * 2, OVERWRITES),
    Hazard(transpose_in_place_kernel, lambda: (ramp(),), ramp().view(8, 8).T.flatten(), OVERWRITES, 0, ("B", 8)),
    Hazard(reverse_in_place_kernel, lambda: (ramp(),), ramp().flip(0), OVERWRITES, 0),
    Hazard(other_mask_kernel, lambda: (ramp() - 31.5,), (ramp() - 31.5).where(ramp() > 31.5, 5.0), OVERWRITES, 0),
    Hazard(induction_kernel, lambda: (*pair(), UP - 2, 3), NEXT[UP.long()], INDUCTION),
]


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: hazard.kernel.__name__)
def test_a_load_sees_memory_as_it_was_where_it_stands(hazard, monkeypatch):
    assert torch.equal(hazard.run(), hazard.want)
    rule, dropped = hazard.rule
    monkeypatch.setattr(f"lychee.backends.cpu.order.{rule}", dropped)
    assert not torch.equal(hazard.run(), hazard.want), "this hazard does not need the rule: it tests nothing"


def reasons(kernel, *args, **constants):
    return list(order.analyse(func_of(kernel, *args, **constants)).forced.values())


@triton.jit
def in_place_kernel(p, n, N: tl.constexpr):
    o = tl.arange(0, N)
    x = tl.load(p + o, mask=o < n)
    tl.store(p + o, x * 2 + 1, mask=o < n)


@triton.jit
def reused_kernel(p, q, HEAVY: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, N)
    x = tl.load(p + o)
    y = tl.exp(x) if HEAVY else x + 1
    tl.store(q + o, y / tl.sum(y, 0))


@triton.jit
def repeated_kernel(p, q, trips, HEAVY: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, N)
    x = tl.load(p + o)
    y = tl.exp(x) if HEAVY else x + 1
    total = tl.zeros((N,), tl.float32)
    for i in range(trips):
        total += y * i
    tl.store(q + o, total)


def test_what_one_loop_can_compute_needs_no_buffer():
    assert reasons(in_place_kernel, ramp(), 50, N=N) == []


@pytest.mark.parametrize("heavy", [True, False])
def test_only_dear_values_are_computed_once(heavy):
    p, q = pair()
    assert ("dear, and used by several nests" in reasons(reused_kernel, p, q, HEAVY=heavy, N=N)) == heavy
    assert ("dear, and used inside a loop" in reasons(repeated_kernel, p, q, 3, HEAVY=heavy, N=N)) == heavy


def test_reasons_of_memory_are_said():
    p, q = pair()
    assert "memory may change before it is used" in reasons(store_between_kernel, p, q, N=N)
    assert "a store that may overwrite what it reads" in reasons(shift_kernel, p, q, N=N)
    assert "start of an induction that reads memory" in reasons(induction_kernel, p, q, UP, 3, N=N)


@triton.jit
def scalar_kernel(p, q, N: tl.constexpr):
    first = tl.load(p)
    tl.store(p, 5.0)
    tl.store(q + tl.arange(0, N), tl.arange(0, N) + first)


def test_scalars_are_read_where_they_stand():
    p, q = NEXT.clone(), torch.zeros(N)
    run(func_of(scalar_kernel, p, q, N=N), p, q)
    assert torch.equal(q, NEXT)


@triton.jit
def swap_kernel(p, q, trips, N: tl.constexpr):
    o = tl.arange(0, N)
    x = tl.load(p + o)
    y = tl.load(q + o)
    for _ in range(trips):
        x, y = y, x + y
    tl.store(p + o, x)
    tl.store(q + o, y)


def test_carried_tiles_take_their_values_at_once():
    p, q = ramp(), ramp() * 10
    run(func_of(swap_kernel, p, q, 4, N=N), p, q, 4)
    assert torch.equal(p, ramp() * (2 + 30))
    assert torch.equal(q, ramp() * (3 + 50))
