"""Logits and keys and values do not depend on how a sequence's tokens are cut into passes, to the bit.

So speculative decoding sees what native decoding sees, near ties included, in every dtype and format.
"""

from functools import cache

import pytest
import torch

from lychee import demo
from lychee.models.batch import Batch
from lychee.models.kv_cache import KVCache
from lychee.models.llama import Llama
from tests.conftest import DEVICE
from tests.kernels.batches import bits

PLAIN = [(dtype, None, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
QUANTISED = [(torch.float32, "int8", torch.float32), (torch.float32, "int4", torch.int8)]
# Dtype of activations, format of the weights, dtype of the KV cache.
FORMATS = pytest.mark.parametrize("fmt", [*PLAIN, *QUANTISED], ids=str)
BLOCK_SIZE, NUM_BLOCKS, LENGTH = 16, 12, 83
TABLE = [5, 0, 9, 3, 11, 7, 2]
PARENTS = [-1, 0, 1, 2, 0, 4, 4, 1, 0, 8, 9, 9]


@cache
def model(dtype, quant):
    return Llama.load(demo.TARGET, DEVICE, dtype, quant)


@cache
def tokens(count=LENGTH):
    return torch.randint(0, 4000, (count,), generator=torch.Generator().manual_seed(0)).tolist()


class Run:
    """A sequence in a cache of its own; every slot that holds no token is NaN, or of scales that are."""

    def __init__(self, fmt, num_blocks=NUM_BLOCKS):
        dtype, quant, kv_dtype = fmt
        self.model, self.length = model(dtype, quant), 0
        self.kv = KVCache.allocate(self.model.config, num_blocks, BLOCK_SIZE, kv_dtype, DEVICE)
        self.kv.storage.fill_(-1 if kv_dtype is torch.int8 else float("nan"))

    def prefill(self, chunk):
        logits = self.model.forward(Batch.prefill([chunk], [self.length], [TABLE], BLOCK_SIZE, DEVICE), self.kv)
        self.length += len(chunk)
        return logits

    def decode(self, tree, parents, keep=0):
        """Logits of every node; the first `keep` nodes, a chain, become part of the sequence."""
        batch = Batch.decode([tree], [parents], [self.length], [TABLE], BLOCK_SIZE, DEVICE)
        logits = self.model.forward(batch, self.kv)
        self.length += keep
        return logits


@FORMATS
@pytest.mark.parametrize("chunk", [1, 7, 16, 32, 82])
def test_a_prefill_in_chunks_has_the_bits_of_the_whole(fmt, chunk):
    whole, parts = Run(fmt), Run(fmt)
    want = whole.prefill(tokens())
    assert torch.isfinite(want).all()
    got = [parts.prefill(tokens()[at : at + chunk]) for at in range(0, LENGTH, chunk)]
    assert bits(torch.cat(got)) == bits(want)
    assert bits(parts.kv.storage) == bits(whole.kv.storage)


@FORMATS
def test_tokens_decoded_one_by_one_have_the_bits_of_their_prefill(fmt):
    whole, steps = Run(fmt), Run(fmt)
    want = whole.prefill(tokens())
    got = [steps.decode([token], [-1], keep=1) for token in tokens()]
    assert bits(torch.cat(got)) == bits(want)
    assert bits(steps.kv.storage) == bits(whole.kv.storage)


@FORMATS
def test_a_verified_chain_has_the_bits_of_native_decoding(fmt):
    native, speculative = Run(fmt), Run(fmt)
    for run in (native, speculative):
        run.prefill(tokens()[:40])
    want = torch.cat([native.decode([token], [-1], keep=1) for token in tokens()[40:]])
    got = []
    for first in range(40, LENGTH, 9):
        chain = tokens()[first : first + 9]
        got.append(speculative.decode(chain, list(range(-1, len(chain) - 1)), keep=len(chain)))
    assert bits(torch.cat(got)) == bits(want)
    assert bits(speculative.kv.storage) == bits(native.kv.storage)


@FORMATS
def test_every_node_of_a_tree_has_the_bits_of_native_decoding_along_its_path(fmt):
    tree = tokens(200)[100 : 100 + len(PARENTS)]
    run = Run(fmt)
    run.prefill(tokens()[:50])
    got = run.decode(tree, PARENTS)
    for node in range(len(PARENTS)):
        path = [node]
        while PARENTS[path[0]] >= 0:
            path.insert(0, PARENTS[path[0]])
        native = Run(fmt)
        native.prefill(tokens()[:50])
        for place in path:
            want = native.decode([tree[place]], [-1], keep=1)
        assert bits(got[node]) == bits(want[0]), node


@FORMATS
@pytest.mark.parametrize("company", [1, 14, 40])
def test_a_sequence_has_the_same_bits_in_any_batch(fmt, company):
    alone = Run(fmt)
    alone.prefill(tokens()[:40])
    want = alone.decode(tokens()[40:43], [-1, 0, 0])
    for place in (0, company):
        tables = [[NUM_BLOCKS + i] for i in range(company)]
        tables.insert(place, TABLE)
        run = Run(fmt, NUM_BLOCKS + company)
        prompts = [tokens(200)[i : i + 1 + i % 11] for i in range(company)]
        prompts.insert(place, tokens()[:40])
        lengths = [len(p) for p in prompts]
        run.model.forward(Batch.prefill(prompts, [0] * (company + 1), tables, BLOCK_SIZE, DEVICE), run.kv)
        trees = [[7, 8]] * company
        trees.insert(place, tokens()[40:43])
        parents = [[-1, 0]] * company
        parents.insert(place, [-1, 0, 0])
        got = run.model.forward(Batch.decode(trees, parents, lengths, tables, BLOCK_SIZE, DEVICE), run.kv)
        assert bits(got[2 * place : 2 * place + 3]) == bits(want)
