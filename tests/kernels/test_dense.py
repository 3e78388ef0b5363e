"""Embedding, norm, linear, rotary and SwiGLU ops: numerics and agreement with transformers."""

import pytest
import torch
from torch.testing import assert_close
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from lychee.kernels import OPS, add_rms_norm, embed, linear, linear_prefill, lm_head, rms_norm, rope_store, swiglu
from tests.conftest import DEVICE
from tests.kernels.harness import check_launch

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def launched(op, *args):
    """The outputs of the op's kernel, on any device."""
    arguments = op.contract.arguments(args, {})
    return op.run(arguments, op.contract.check(arguments))


def both_faces(op, *args):
    return launched(op, *args), op.reference(*args)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


@DTYPES
@pytest.mark.parametrize("num_tokens", [15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 129])
@pytest.mark.parametrize("name", ["linear", "lm_head", "linear_prefill"])
def test_linear_layers_cover_every_row_around_tile_edges(name, num_tokens, dtype):
    torch.manual_seed(num_tokens)
    op = OPS[name]
    sizes = {"num_tokens": num_tokens, "in_features": 40, "out_features": 66, "has_bias": 1}
    check_launch(op, op.sample(dtype, DEVICE, **{k: v for k, v in sizes.items() if k in op.axes}), dtype)


@pytest.mark.parametrize("op", [linear, lm_head, linear_prefill], ids=lambda op: op.name)
def test_linear_layers_sum_in_fp32(op):
    """A half-precision running sum of ones stops at 2048."""
    x, weight = randn(2, 4097, dtype=torch.float16).fill_(1), randn(3, 4097, dtype=torch.float16).fill_(1)
    for y in both_faces(op, x, weight):
        assert_close(y, torch.full_like(y, 4097.0), rtol=0, atol=0)


def test_lm_head_keeps_logits_that_half_precision_would_round_together():
    x = torch.tensor([[2048.0, 1.0]], dtype=torch.float16, device=DEVICE)
    weight = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float16, device=DEVICE)
    for y in both_faces(lm_head, x, weight):
        assert (y.dtype, y.tolist()) == (torch.float32, [[2048.0, 2049.0]])


@DTYPES
def test_add_rms_norm_equals_an_addition_then_rms_norm(dtype):
    torch.manual_seed(0)
    x, residual, weight = randn(3, 37, dtype=dtype), randn(3, 37, dtype=dtype), randn(37, dtype=dtype)
    for face in (launched, lambda op, *args: op.reference(*args)):
        normed, total = face(add_rms_norm, x, residual, weight, 1e-5)
        assert_close(total, x + residual, rtol=0, atol=0)
        assert_close(normed, face(rms_norm, total, weight, 1e-5), rtol=0, atol=0)


def test_rms_norm_of_large_half_precision_values_does_not_overflow():
    x = torch.full((2, 24), 60000.0, dtype=torch.float16, device=DEVICE)
    for y in both_faces(rms_norm, x, torch.ones_like(x[0]), 1e-5):
        assert_close(y, torch.ones_like(y))


def test_rms_norm_of_a_zero_row_is_zero():
    x = torch.zeros(2, 24, device=DEVICE)
    for y in both_faces(rms_norm, x, torch.ones_like(x[0]), 1e-5):
        assert_close(y, x, rtol=0, atol=0)


def test_rms_norm_agrees_with_transformers():
    torch.manual_seed(0)
    x, layer = randn(5, 64), LlamaRMSNorm(64, eps=1e-5).to(DEVICE)
    layer.weight.data.normal_()
    for y in both_faces(rms_norm, x, layer.weight.data, 1e-5):
        assert_close(y, layer(x).detach())


def test_swiglu_of_extreme_gates_is_finite():
    gate = torch.tensor([[-60000.0, -100.0, 0.0, 100.0, 60000.0]], device=DEVICE)
    for y in both_faces(swiglu, gate, torch.ones_like(gate)):
        assert_close(y, torch.tensor([[0.0, 0.0, 0.0, 100.0, 60000.0]], device=DEVICE))


def test_embedding_of_a_dead_node_is_zero():
    table = torch.full((3, 5), 2.0, device=DEVICE)
    tokens = torch.tensor([-1, 2], dtype=torch.int32, device=DEVICE)
    for y in both_faces(embed, tokens, table):
        assert y.tolist() == [[0.0] * 5, [2.0] * 5]


def rope_arguments(slots):
    torch.manual_seed(0)
    num_tokens, positions = len(slots), torch.arange(len(slots), dtype=torch.int32, device=DEVICE) * 3
    angles = torch.outer(torch.arange(50.0), 10000.0 ** -torch.arange(0, 1, 1 / 8)).to(DEVICE)
    caches = [torch.zeros(20, 2, 16, device=DEVICE) for _ in "kv"]
    heads = [randn(num_tokens, n, 16) for n in (4, 2, 2)]
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return *heads, *caches, table, positions, torch.tensor(slots, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("face", [launched, lambda op, *args: op.reference(*args)], ids=["launch", "reference"])
def test_rope_agrees_with_transformers_and_fills_only_the_mapped_slots(face):
    arguments = rope_arguments([7, -1, 0, 19])
    q, k, v, k_cache, v_cache, table, positions, _ = arguments
    cos, sin = (half.repeat(1, 2)[None] for half in table[positions].chunk(2, dim=-1))
    want_q, want_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    assert_close(face(rope_store, *arguments), want_q[0].transpose(0, 1))
    stored = [0, 2, 3]  # the row of slot -1 stores nothing
    for cache, rows in ((k_cache, want_k[0].transpose(0, 1)), (v_cache, v)):
        want = torch.zeros_like(cache)
        want[[7, 0, 19]] = rows[stored]
        assert_close(cache, want)
