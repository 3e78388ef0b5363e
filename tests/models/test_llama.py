"""The forward pass equals transformers', whole, in chunks, token by token and on every path of a tree."""

from functools import cache

import numpy as np
import pytest
import torch
import transformers

from lychee.kernels import commit_kv
from lychee.models.batch import Batch
from lychee.models.kv_cache import KVCache
from lychee.models.llama import Llama
from tests.factory import make_model_dir

BLOCK_SIZE = 8
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPES = {
    "llama2": {"kv_heads": 4, "tie": False},
    "llama3": {"kv_heads": 2, "tie": False, "rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING},
    "llama3_tied": {
        "kv_heads": 1,
        "rope_parameters": {**LLAMA3_SCALING, "rope_theta": 500000.0},
        "eos": [7, 9],
        "layers": 3,
    },
    "tinyllama": {"heads": 8, "kv_heads": 2, "tie": False, "max_position": 2048},
    "smollm2": {"heads": 3, "kv_heads": 1, "hidden": 48, "rope_theta": 100000.0, "shards": 2},
    "linear_rope": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "wide_heads_and_biases": {"head_dim": 32, "attention_bias": True, "mlp_bias": True},
}
LENGTH = 61


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Ours and transformers' model of a shape, loaded once."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def pair(shape):
        path = make_model_dir(root / shape, **SHAPES[shape], tokenizer=None, vocab=100, seed=3)
        theirs = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        return Llama.load(path), theirs

    return pair


@pytest.fixture(params=SHAPES)
def pair(request, models):
    return models(request.param)


@torch.no_grad()
def theirs_on(model, tokens):
    return model(torch.tensor([tokens])).logits[0]


def random_tokens(count, seed=0):
    return np.random.default_rng(seed).integers(0, 100, count).tolist()


def empty_cache(model, num_blocks=32):
    """Every slot NaN: what was not stored must not be read."""
    kv = KVCache.allocate(model.config, num_blocks, BLOCK_SIZE, torch.float32, "cpu")
    kv.storage.fill_(float("nan"))
    return kv


def scattered_table(count, seed=0, num_blocks=32):
    return np.random.default_rng(seed).permutation(num_blocks)[:count].tolist()


def prefilled(model, tokens, table, chunk=LENGTH, kv=None):
    """The cache after `tokens`, and their logits."""
    kv = kv or empty_cache(model)
    logits = [
        model.forward(Batch.prefill([tokens[at : at + chunk]], [at], [table], BLOCK_SIZE), kv)
        for at in range(0, len(tokens), chunk)
    ]
    return kv, torch.cat(logits)


def close(got, want):
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_prefill_in_chunks_of_any_size_equals_transformers(pair):
    ours, theirs = pair
    tokens = random_tokens(LENGTH)
    want = theirs_on(theirs, tokens)
    for chunk in (LENGTH, 1, 7, 8, 16, 60):
        close(prefilled(ours, tokens, scattered_table(8, chunk), chunk)[1], want)


def test_decoding_token_by_token_equals_transformers(pair):
    ours, theirs = pair
    tokens, table = random_tokens(LENGTH), scattered_table(8)
    want = theirs_on(theirs, tokens)
    kv, _ = prefilled(ours, tokens[:40], table)
    for at in range(40, LENGTH):
        close(ours.forward(Batch.decode([[tokens[at]]], [[-1]], [at], [table], BLOCK_SIZE), kv), want[at : at + 1])


def test_a_chain_equals_transformers(pair):
    ours, theirs = pair
    tokens, table = random_tokens(LENGTH), scattered_table(8)
    kv, _ = prefilled(ours, tokens[:45], table)
    batch = Batch.decode([tokens[45:]], [list(range(-1, LENGTH - 46))], [45], [table], BLOCK_SIZE)
    close(ours.forward(batch, kv), theirs_on(theirs, tokens)[45:])


PARENTS = [-1, 0, 1, 2, 0, 4, 4, 1, 0, 8, 9, 9]


def path_of(node, parents):
    return [] if node < 0 else [*path_of(parents[node], parents), node]


def test_every_node_of_a_tree_equals_transformers_on_its_path(pair):
    ours, theirs = pair
    tokens, table = random_tokens(43), scattered_table(8)
    tree = random_tokens(len(PARENTS), seed=1)
    kv, _ = prefilled(ours, tokens, table)
    got = ours.forward(Batch.decode([tree], [PARENTS], [43], [table], BLOCK_SIZE), kv)
    for node in range(len(PARENTS)):
        path = [tree[i] for i in path_of(node, PARENTS)]
        close(got[node], theirs_on(theirs, tokens + path)[-1])


def test_decoding_goes_on_from_an_accepted_branch(models):
    ours, theirs = models("llama3")
    tokens, table = random_tokens(43), scattered_table(8)
    tree = random_tokens(len(PARENTS), seed=1)
    kv, _ = prefilled(ours, tokens, table)
    ours.forward(Batch.decode([tree], [PARENTS], [43], [table], BLOCK_SIZE), kv)
    path = path_of(10, PARENTS)
    ints = {"dtype": torch.int32}
    commit_kv(kv.storage, torch.tensor([path], **ints), torch.tensor([43], **ints), torch.tensor([table], **ints), 8)
    tokens += [tree[i] for i in path] + [5]
    got = ours.forward(Batch.decode([[5]], [[-1]], [len(tokens) - 1], [table], BLOCK_SIZE), kv)
    close(got[0], theirs_on(theirs, tokens)[-1])


def test_a_batch_gives_each_sequence_what_it_gets_alone(models):
    ours, _ = models("tinyllama")
    prompts = [random_tokens(n, seed=n) for n in (1, 9, 30, 17)]
    tables = np.array_split(np.random.default_rng(5).permutation(32), 4)
    trees = [[-1], PARENTS, [-1, 0, 0], list(range(-1, 7))]
    drafts = [random_tokens(len(tree), seed=len(tree)) for tree in trees]
    lens = [len(p) for p in prompts]
    kv = empty_cache(ours)
    together = [
        ours.forward(Batch.prefill(prompts, [0] * 4, tables, BLOCK_SIZE), kv).split(lens),
        ours.forward(Batch.decode(drafts, trees, lens, tables, BLOCK_SIZE), kv).split([len(t) for t in trees]),
    ]
    for i in range(4):
        alone, logits = prefilled(ours, prompts[i], tables[i])
        close(together[0][i], logits)
        batch = Batch.decode([drafts[i]], [trees[i]], [lens[i]], [tables[i]], BLOCK_SIZE)
        close(together[1][i], ours.forward(batch, alone))


@pytest.mark.parametrize("rows", [[], [0], [4, 1]])
def test_only_the_rows_asked_for_reach_the_head(models, rows):
    ours, _ = models("llama2")
    tokens, table = random_tokens(5), scattered_table(1)
    every = prefilled(ours, tokens, table)[1]
    batch = Batch.prefill([tokens], [0], [table], BLOCK_SIZE, logit_rows=rows)
    got = ours.forward(batch, empty_cache(ours))
    assert got.shape == (len(rows), 100)
    close(got, every[rows])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lower_precision_stays_near_and_gives_fp32_logits(models, tmp_path, dtype):
    path = make_model_dir(tmp_path, **SHAPES["llama3"], tokenizer=None, vocab=100, seed=3)
    ours = Llama.load(path, dtype=dtype)
    assert ours.weights.layers[0].q.weight.dtype == dtype
    tokens = random_tokens(20)
    kv = KVCache.allocate(ours.config, 4, BLOCK_SIZE, dtype, "cpu")
    got = ours.forward(Batch.prefill([tokens], [0], [[2, 0, 3]], BLOCK_SIZE), kv)
    assert got.dtype == torch.float32
    want = theirs_on(models("llama3")[1], tokens)
    assert (got - want).abs().mean() < {torch.float16: 0.02, torch.bfloat16: 0.15}[dtype]


def test_the_checkpoints_own_dtype_is_the_default(tmp_path):
    path = make_model_dir(tmp_path, tokenizer=None, dtype=torch.bfloat16, torch_dtype="bfloat16")
    assert Llama.load(path).weights.dtype == torch.bfloat16


def test_a_block_costs_what_its_storage_holds(models):
    config = models("tinyllama")[0].config
    kv = KVCache.allocate(config, 5, BLOCK_SIZE, torch.float16, "cpu")
    assert kv.num_blocks == 5
    assert 5 * KVCache.block_bytes(config, BLOCK_SIZE, torch.float16) == kv.storage.nbytes
    keys, values = kv.layers[1]
    assert keys.shape == values.shape == (40, 2, 8)
    values.fill_(0)
    keys.fill_(1)
    assert kv.storage[1, 0].eq(1).all()
    assert kv.storage[1, 1].eq(0).all()
