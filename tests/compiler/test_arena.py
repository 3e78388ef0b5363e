"""Memory that values share: no value is read after its span was given away."""

import sys

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lychee.compiler import lower as lower_function
from lychee.compiler import optimized
from lychee.compiler.lower import _lives, _needs, arena_bytes
from lychee.compiler.memory import assign
from lychee.kernels import embed, linear, rms_norm
from lychee.kernels.kernel import Table
from tests.kernels.batches import bits

from .test_passes import DENSE, SCALE, TABLE, programs, results, traced


def poisoned(program, rows):
    """Results where every span of the arena is NaN as soon as its value is dead."""
    sizes = {"num_tokens": rows}
    lowered = lower_function(program, sizes)
    inputs = dict(zip(program.inputs, lowered.inputs, strict=True))
    needs = _needs(program, sizes, inputs)[2]
    offsets, _ = assign(needs)
    lowered.arena.fill_(255)
    lowered.inputs[0].copy_(torch.arange(rows) * 7 % 50)
    for step, launches in enumerate(lowered.steps):
        Table(launches).replay()
        for need, at in zip(needs, offsets, strict=True):
            if need.last == step:
                lowered.arena[at : at + need.num_bytes] = 255
    return [bits(result) for result in lowered.results]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(programs(), st.sampled_from([1, 3, 8]))
def test_what_is_dead_is_never_read(function, rows):
    for program in (traced(function), optimized(traced(function))):
        assert poisoned(program, rows) == results(program, rows)
        assert arena_bytes(program, {"num_tokens": rows}) == len(lower_function(program, {"num_tokens": rows}).arena)


def chained(tokens):
    x = embed(tokens, TABLE)
    y = linear(rms_norm(x, SCALE, 1e-5), DENSE[0])
    return linear(rms_norm(linear(y, DENSE[1]), SCALE, 1e-5), DENSE[2])


def test_a_lifetime_that_ends_one_step_early_is_found(monkeypatch):
    program = traced(chained)
    want = results(program, 3)
    assert poisoned(program, 3) == want
    last = len(program.calls)

    def cut(program):
        return {v: (a, b if b == last else max(a, b - 1)) for v, (a, b) in _lives(program).items()}

    monkeypatch.setattr(sys.modules[_lives.__module__], "_lives", cut)
    assert poisoned(program, 3) != want
