"""A lowered program computes on whatever stands in its inputs, in memory that it shares with other programs."""

from dataclasses import dataclass

import pytest
import torch

from lychee.compiler import lower, trace
from lychee.kernels import embed, linear, rms_norm, swiglu
from lychee.kernels.kernel import can_bind
from lychee.kernels.types import TokenIds
from tests.kernels.batches import bits

torch.manual_seed(0)
TABLE, GATE, UP, DOWN = torch.randn(50, 24), torch.randn(40, 24), torch.randn(40, 24), torch.randn(24, 40)
SCALE = torch.randn(24)


@dataclass(frozen=True)
class Tokens:
    tokens: TokenIds


def traced(function):
    return trace(lambda tracer: function(tracer.struct(Tokens)), "cpu")


def block(x):
    y = rms_norm(x, SCALE, 1e-5)
    return linear(swiglu(linear(y, GATE), linear(y, UP)), DOWN)


def blocks(given):
    return block(block(block(embed(given.tokens, TABLE))))


PROGRAM = traced(blocks)


def run(lowered, tokens):
    lowered.inputs[0].copy_(tokens)
    lowered.replay()
    return lowered.results[0]


def some(count, seed):
    return torch.randint(0, 50, (count,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [1, 3, 16, 70])
def test_each_replay_has_the_bits_of_the_function_on_the_new_inputs(count):
    lowered = lower(PROGRAM, {"num_tokens": count})
    for seed in range(4):
        tokens = some(count, seed)
        assert bits(run(lowered, tokens)) == bits(blocks(Tokens(tokens)))


def test_nothing_is_read_that_the_replay_did_not_write():
    lowered = lower(PROGRAM, {"num_tokens": 5})
    lowered.arena.fill_(255)  # NaN in every dtype
    assert bits(run(lowered, some(5, 0))) == bits(blocks(Tokens(some(5, 0))))


def test_nothing_is_computed_by_lowering():
    arena = torch.full((1 << 16,), 7, dtype=torch.uint8)
    lowered = lower(PROGRAM, {"num_tokens": 5}, arena)
    assert lowered.arena is arena
    assert (arena == 7).all()


def test_programs_that_share_an_arena_do_not_disturb_each_other():
    large = lower(PROGRAM, {"num_tokens": 9})
    small = lower(PROGRAM, {"num_tokens": 2}, large.arena)
    assert small.arena is large.arena
    for seed in range(3):
        assert bits(run(large, some(9, seed))) == bits(blocks(Tokens(some(9, seed))))
        assert bits(run(small, some(2, seed))) == bits(blocks(Tokens(some(2, seed))))


def test_an_arena_that_is_too_small_is_left_alone():
    small = lower(PROGRAM, {"num_tokens": 2})
    large = lower(PROGRAM, {"num_tokens": 9}, small.arena)
    assert len(large.arena) > len(small.arena)
    assert bits(run(small, some(2, 0))) == bits(blocks(Tokens(some(2, 0))))


def test_values_that_are_dead_lend_their_memory():
    outputs = [v for call in PROGRAM.calls for v in call.outputs]
    sizes = {"num_tokens": 16}
    assert len(lower(PROGRAM, sizes).arena) < sum(v.num_bytes(sizes) for v in outputs) / 2


def test_a_view_keeps_the_value_that_it_is_of():
    def function(given):
        first = embed(given.tokens, TABLE)
        halves = first.view(first.shape[0] * 2, 12)
        later = block(block(first))
        return swiglu(halves.view_as(later), later)

    lowered = lower(traced(function), {"num_tokens": 6})
    assert bits(run(lowered, some(6, 1))) == bits(function(Tokens(some(6, 1))))


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_only_launches_for_the_cpu_can_be_bound(device):
    assert can_bind(torch.device("cpu"))
    assert not can_bind(torch.device(device))


def test_values_may_have_any_number_of_bytes():
    table = torch.randn(50, 1)
    program = traced(lambda given: embed(given.tokens, table))  # its only value has 12 bytes
    lowered = lower(program, {"num_tokens": 3})
    assert bits(run(lowered, some(3, 0))) == bits(embed(some(3, 0), table))
