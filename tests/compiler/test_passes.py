"""Passes: what they make of a program, as text, and that it computes the same, to the bit."""

from dataclasses import dataclass, replace
from itertools import chain
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lychee import demo
from lychee.compiler import Buckets, lower, optimized, parse, trace
from lychee.compiler.passes import gates_fused, without_dead_calls
from lychee.compiler.passes.effects import may_move
from lychee.kernels import (
    add_rms_norm,
    commit_kv,
    embed,
    gated_linear,
    linear,
    linear_int8,
    linear_prefill,
    rms_norm,
    swiglu,
)
from lychee.kernels.quantized import sample_int8
from lychee.kernels.types import TokenIds
from lychee.models import compiled as compiled_module
from lychee.models.batch import Batch
from lychee.models.compiled import CompiledLlama
from lychee.models.kv_cache import KVCache
from lychee.models.layout import Rows
from lychee.models.llama import Llama
from lychee.models.tokenizer_files import load_tokenizer
from tests.kernels.batches import bits

torch.manual_seed(0)
HIDDEN = 64
TABLE, SCALE = torch.randn(50, HIDDEN), torch.randn(HIDDEN)
DENSE = [torch.randn(HIDDEN, HIDDEN) * 0.2 for _ in range(3)]
BIAS = torch.randn(HIDDEN)
INT8 = [sample_int8(HIDDEN, HIDDEN, 0, "cpu"), sample_int8(HIDDEN, HIDDEN, 32, "cpu")]
WIDE = [torch.randn(2 * HIDDEN, HIDDEN), torch.randn(2 * HIDDEN, HIDDEN), torch.randn(HIDDEN, 2 * HIDDEN)]
NAMES = {SCALE.data_ptr(): "scale", TABLE.data_ptr(): "embed", BIAS.data_ptr(): "bias"}
NAMES |= dict(zip((w.data_ptr() for w in WIDE), ("gate", "up", "down"), strict=True))


@dataclass(frozen=True)
class Tokens:
    tokens: TokenIds


def traced(function):
    return trace(lambda tracer: function(tracer.struct(Tokens).tokens), "cpu")


def block(tokens):
    x = embed(tokens, TABLE)
    rms_norm(rms_norm(x, SCALE, 1e-5), SCALE, 1e-5)
    y = rms_norm(x, SCALE, 1e-5)
    gate, up = linear(y, WIDE[0]), linear(y, WIDE[1], None)
    return add_rms_norm(linear(swiglu(gate, up), WIDE[2], BIAS), x, SCALE, 1e-5)


TRACED = """\
(%tokens: i32[num_tokens])
%0: f32[num_tokens, 64] = embed(%tokens, @embed)
%1: f32[num_tokens, 64] = rms_norm(%0, @scale, eps=1e-05)
%2: f32[num_tokens, 64] = rms_norm(%1, @scale, eps=1e-05)
%3: f32[num_tokens, 64] = rms_norm(%0, @scale, eps=1e-05)
%4: f32[num_tokens, 128] = linear(%3, @gate)
%5: f32[num_tokens, 128] = linear(%3, @up)
%6: f32[num_tokens, 128] = swiglu(%4, %5)
%7: f32[num_tokens, 64] = linear(%6, @down, @bias)
%8: f32[num_tokens, 64], %9: f32[num_tokens, 64] = add_rms_norm(%7, %0, @scale, eps=1e-05)
return %8: f32[num_tokens, 64], %9: f32[num_tokens, 64]
"""
ALIVE = "".join(line for line in TRACED.splitlines(True) if not line.startswith(("%1:", "%2:")))
OPTIMIZED = """\
(%tokens: i32[num_tokens])
%0: f32[num_tokens, 64] = embed(%tokens, @embed)
%3: f32[num_tokens, 64] = rms_norm(%0, @scale, eps=1e-05)
%6: f32[num_tokens, 128] = gated_linear(%3, @gate, @up)
%7: f32[num_tokens, 64] = linear(%6, @down, @bias)
%8: f32[num_tokens, 64], %9: f32[num_tokens, 64] = add_rms_norm(%7, %0, @scale, eps=1e-05)
return %8: f32[num_tokens, 64], %9: f32[num_tokens, 64]
"""


def test_texts_before_and_after_each_pass():
    program = traced(block)
    before = program.text(NAMES)
    assert before == TRACED
    assert without_dead_calls(program).text(NAMES) == ALIVE
    assert optimized(program).text(NAMES) == OPTIMIZED
    assert program.text(NAMES) == before, "a pass changed the program that it was given"
    assert optimized(optimized(program)).text(NAMES) == OPTIMIZED


def test_an_optimized_program_is_read_back_from_its_text():
    program = optimized(traced(block))
    assert parse(program.text(NAMES), program.constants(NAMES), "cpu").text(NAMES) == OPTIMIZED


def both_layers(x, gate, up):
    return swiglu(linear(x, gate), linear(x, up))


def kept_result(x):
    gate = linear(x, DENSE[0])
    return swiglu(gate, linear(x, DENSE[1])), gate


def one_value_twice(x):
    gate = linear(x, DENSE[0])
    return swiglu(gate, gate)


NOT_FUSED = {
    "of two values": lambda x: swiglu(linear(x, DENSE[0]), linear(rms_norm(x, SCALE, 1e-5), DENSE[1])),
    "read elsewhere": kept_result,
    "one value twice": one_value_twice,
    "of prefill": lambda x: swiglu(linear_prefill(x, DENSE[0]), linear_prefill(x, DENSE[1])),
    "of groups": lambda x: swiglu(linear_int8(x, INT8[1]), linear_int8(x, INT8[1])),
    "of two formats": lambda x: swiglu(linear_int8(x, INT8[0]), linear(x, DENSE[0])),
    "of a view": lambda x: swiglu(linear(x, DENSE[0]).view(x.shape[0] * 2, 32), linear(x, DENSE[1]).view(-1, 32)),
}


@pytest.mark.parametrize("name", NOT_FUSED)
def test_layers_that_no_fused_op_computes_are_left_alone(name):
    program = traced(lambda tokens: NOT_FUSED[name](embed(tokens, TABLE)))
    assert gates_fused(program).calls == program.calls


def test_calls_that_write_in_place_are_never_dead_and_hold_up_what_reads_there():
    storage = torch.zeros(1, 2, 16, 1, 4)

    def writes(tracer):
        contexts = tracer.tensor("contexts", (1,), torch.int32)
        paths, tables = (tracer.tensor(n, (1, 2), torch.int32) for n in ("paths", "tables"))
        commit_kv(storage, paths, contexts, tables, 8)
        return contexts

    program = trace(writes, "cpu")
    assert without_dead_calls(program).calls == program.calls
    commit = program.calls[0]
    layer = traced(lambda tokens: linear(embed(tokens, TABLE), DENSE[0])).calls[1]
    assert may_move(layer, (commit,))
    assert not may_move(commit, ())
    part = storage[0, 0, :, 0, :].view(4, 16)  # weights in the memory that is written
    assert not may_move(replace(layer, arguments={**layer.arguments, "weight": part}), (commit,))


@st.composite
def programs(draw):
    """Straight-line code over rows of HIDDEN numbers: layers, gates, norms, and values that nobody reads."""
    steps = draw(st.lists(st.tuples(st.sampled_from("nldgGia"), *[st.integers(0, 99)] * 3), min_size=1, max_size=14))
    wanted = draw(st.lists(st.integers(0, 99), min_size=1, max_size=3))

    def function(tokens):
        values = [embed(tokens, TABLE)]
        for kind, *at in steps:
            a, b = (values[i % len(values)] for i in at[:2])
            one, two = DENSE[at[1] % 3], DENSE[at[2] % 3]
            if kind == "n":
                values.append(rms_norm(a, SCALE, 1e-5))
            elif kind == "l":
                values.append(linear(a, one, BIAS if at[2] % 2 else None))
            elif kind == "d":
                values += add_rms_norm(a, b, SCALE, 1e-5)
            elif kind == "g":
                values.append(swiglu(a, b))
            elif kind == "G":
                values.append(swiglu(linear(a, one, BIAS), linear(a, two)))
            elif kind == "i":
                values.append(swiglu(linear_int8(a, INT8[0]), linear_int8(a, INT8[at[2] % 2])))
            else:
                layers = linear(a, one), linear(a, two)
                values += [*layers, swiglu(*layers)] if at[1] % 2 else [swiglu(*layers)]
        return tuple(values[i % len(values)] for i in wanted)

    return function


def results(program, rows):
    lowered = lower(program, {"num_tokens": rows})
    lowered.arena.fill_(255)
    lowered.inputs[0].copy_(torch.arange(rows) * 7 % 50)
    lowered.replay()
    return [bits(result) for result in lowered.results]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(programs(), st.sampled_from([1, 3, 8]))
def test_no_pass_changes_a_bit_of_what_a_random_program_computes(function, rows):
    program = traced(function)
    want = results(program, rows)
    for change in (without_dead_calls, gates_fused, optimized):
        assert results(change(program), rows) == want
    eager = function((torch.arange(rows) * 7 % 50).int())
    assert [bits(value) for value in eager] == want


def test_a_pass_that_changes_a_bit_is_found():
    def swapped(program):
        def change(call):
            given = call.arguments
            both = {"gate": given["up"], "up": given["gate"]} if call.op is gated_linear else {}
            return replace(call, arguments={**given, **both})

        fused = gates_fused(program)
        return replace(fused, calls=tuple(map(change, fused.calls)))

    program = traced(lambda tokens: both_layers(embed(tokens, TABLE), DENSE[0], DENSE[1]))
    assert results(swapped(program), 3) != results(program, 3)


@pytest.mark.parametrize("path", [demo.DRAFT, demo.TARGET], ids=["draft", "target"])
@pytest.mark.parametrize("quant", [None, pytest.param("int8", marks=pytest.mark.slow)])
def test_packaged_prompts_have_the_same_bits_traced_fused_and_op_by_op(path, quant):
    """Logits and caches of the last rows of each prompt, as chains of several lengths."""
    model, tokenizer = Llama.load(path, "cpu", torch.float32, quant), load_tokenizer(path)
    kvs = [KVCache.allocate(model.config, 32, 16, torch.float32, "cpu") for _ in range(3)]
    plain, fused = (CompiledLlama(model, kv, Buckets(after=0)) for kv in kvs[:2])
    with patch.object(compiled_module, "optimized", lambda program: program):
        traced_calls = len(plain.every_row.calls)
    assert len(fused.every_row.calls) == traced_calls - 2 * model.config.num_layers
    for text in chain.from_iterable(demo.prompts().values()):
        ids = tokenizer.encode(text)[-200:]
        for rows in (1, 2, 5):
            context = len(ids) - rows
            blocks = [list(range(-(-len(ids) // 16)))]
            chunk = Rows.prefill([ids[:context]], [0], blocks, 16, [])
            nodes = Rows.decode([ids[context:]], [list(range(-1, rows - 1))], [context], blocks, 16)
            seen = []
            for compiled, kv in zip((plain, fused, None), kvs, strict=True):
                model.forward(Batch.of(chunk), kv)
                logits = compiled.forward(nodes) if compiled else model.forward(Batch.of(nodes), kv)
                seen.append((bits(logits), bits(kv.storage[:, :, : len(ids)])))
            assert seen[0] == seen[1] == seen[2], (text, rows)
