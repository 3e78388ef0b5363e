"""Decode passes that replay bound launches have the bits of passes that run op by op, logits and caches alike."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lychee.compiler import Buckets
from lychee.models.batch import Batch
from lychee.models.compiled import CompiledLlama, bucket
from lychee.models.kv_cache import KVCache
from lychee.models.layout import Rows
from lychee.models.llama import Llama
from tests.kernels.batches import bits

from .families import VOCAB, save_family

BLOCK_SIZE, BLOCKS_EACH, SEQS = 8, 42, 3
FAMILIES = {
    "llama": ("LlamaForCausalLM", {"max_position_embeddings": 400}),
    "windowed": ("MistralForCausalLM", {"max_position_embeddings": 400, "sliding_window": 40}),
    "biased": ("Qwen2ForCausalLM", {"max_position_embeddings": 400}),
    "normed": ("Qwen3ForCausalLM", {"max_position_embeddings": 400}),
}
FORMATS = [
    (torch.float32, None, torch.float32),
    (torch.bfloat16, "int8", torch.int8),
    (torch.float16, "int4", torch.float16),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    @cache
    def made(family):
        path = tmp_path_factory.mktemp(family)
        save_family(path, FAMILIES[family][0], **FAMILIES[family][1], hidden_size=64)
        return path

    return made


def cache_of(model, kv_dtype):
    kv = KVCache.allocate(model.config, SEQS * BLOCKS_EACH, BLOCK_SIZE, kv_dtype, "cpu")
    generator = torch.Generator().manual_seed(1)
    if kv_dtype is torch.int8:  # scales are part of it: any bytes would be NaN now and then
        kv.storage.copy_(torch.randint(0, 60, kv.storage.shape, generator=generator))
    else:
        kv.storage.copy_(torch.randn(kv.storage.shape, generator=generator))
    return kv


@st.composite
def batches(draw):
    """Trees of one to three sequences; contexts on both sides of where buckets end."""
    trees, contexts, tables = [], [], []
    for seq in range(draw(st.integers(1, SEQS))):
        size = draw(st.sampled_from([1, 1, 2, 4, 7]))
        chain = draw(st.booleans())
        trees.append([-1, *(i if chain else draw(st.integers(0, i)) for i in range(size - 1))])
        contexts.append(draw(st.sampled_from([0, 1, 30, 63, 64, 65, 130, 255, 256, 257, 300])))
        needed = -(-(contexts[-1] + size) // BLOCK_SIZE)
        tables.append(list(range(seq * BLOCKS_EACH, seq * BLOCKS_EACH + needed)))
    tokens = [draw(st.lists(st.integers(0, VOCAB - 1), min_size=len(t), max_size=len(t))) for t in trees]
    rows = draw(st.none() | st.lists(st.integers(0, sum(map(len, trees)) - 1), min_size=0, max_size=4))
    return Rows.decode(tokens, trees, contexts, tables, BLOCK_SIZE, rows)


@pytest.mark.parametrize("fmt", FORMATS, ids=["fp32", "int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(passes=st.lists(batches(), min_size=1, max_size=6))
def test_a_replayed_pass_has_the_bits_of_one_that_runs_op_by_op(saved, family, fmt, passes):
    dtype, quant, kv_dtype = fmt
    model = Llama.load(saved(family), "cpu", dtype, quant)
    plain, kv = cache_of(model, kv_dtype), cache_of(model, kv_dtype)
    compiled = CompiledLlama(model, kv, Buckets(after=0))
    for rows in (*passes, *passes):
        assert bits(compiled.forward(rows)) == bits(model.forward(Batch.of(rows), plain))
        assert bits(kv.storage) == bits(plain.storage)


def chain(length, context):
    table = list(range(-(-(context + length) // BLOCK_SIZE)))
    return Rows.decode([[1] * length], [list(range(-1, length - 1))], [context], [table], BLOCK_SIZE)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefixes_that_many_rows_share_are_folded_for_all_of_them(saved, family):
    model = Llama.load(saved(family))
    plain, kv = cache_of(model, torch.float32), cache_of(model, torch.float32)
    tables = [list(range(42)), list(range(42, 84))]
    sizes, parents = (24, 9), [list(range(-1, 23)), list(range(-1, 8))]
    rows = Rows.decode([[7] * n for n in sizes], parents, [300, 280], tables, BLOCK_SIZE)
    compiled = CompiledLlama(model, kv, Buckets(after=0))
    assert bits(compiled.forward(rows)) == bits(model.forward(Batch.of(rows), plain))


def test_passes_of_like_sizes_share_a_bucket_that_holds_them():
    sizes = [bucket(chain(3, context)) for context in range(1, 400)]
    assert len({tuple(s.values()) for s in sizes}) <= 12
    for context, size in zip(range(1, 400), sizes, strict=True):
        assert size["max_context"] >= context
        assert size["max_blocks"] * BLOCK_SIZE >= context + 3


@pytest.mark.parametrize("fmt", FORMATS, ids=["fp32", "int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_short_prompt_has_the_bits_of_one_that_runs_op_by_op(saved, family, fmt):
    dtype, quant, kv_dtype = fmt
    model = Llama.load(saved(family), "cpu", dtype, quant)
    plain, kv = cache_of(model, kv_dtype), cache_of(model, kv_dtype)
    compiled = CompiledLlama(model, kv, Buckets(after=0))
    for count, context in [(1, 0), (5, 0), (8, 3), (13, 100), (16, 250), (64, 250), (15, 321)]:
        table = list(range(-(-(context + count) // BLOCK_SIZE)))
        rows = Rows.prefill([list(range(3, 3 + count))], [context], [table], BLOCK_SIZE, [count - 1])
        assert bits(compiled.forward(rows)) == bits(model.forward(Batch.of(rows), plain))
        assert bits(kv.storage) == bits(plain.storage)
        silent = Rows.prefill([list(range(9, 9 + count))], [context], [table], BLOCK_SIZE, [])
        assert compiled.forward(silent).shape == (0, VOCAB)
        model.forward(Batch.of(silent), plain)
        assert bits(kv.storage) == bits(plain.storage)
    assert len(compiled.buckets) > 2


def test_long_prompts_and_passes_without_logits_run_op_by_op(saved):
    model = Llama.load(saved("llama"))
    compiled = CompiledLlama(model, cache_of(model, torch.float32), Buckets(after=0))
    prompt = Rows.prefill([list(range(65))], [0], [list(range(9))], BLOCK_SIZE, [64])
    assert compiled.forward(prompt).shape == (1, VOCAB)
    silent = Rows.decode([[1]], [[-1]], [3], [[0]], BLOCK_SIZE, logit_rows=[])
    assert compiled.forward(silent).shape == (0, VOCAB)
    assert len(compiled.buckets) == 0
