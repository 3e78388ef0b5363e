"""A row of attention has the same bits in prefill, alone in decode and in a chain, over contexts of several splits."""

import pytest
import torch

from lychee.kernels import attention, attention_prefill
from lychee.kernels.kv_int8 import packed_rows
from lychee.kernels.types import Paging
from tests.conftest import DEVICE
from tests.kernels.batches import bits

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="tensor cores sum prefill's tiles in another order")

LENGTH, BLOCK_SIZE, KV_HEADS, GROUP, HEAD_DIM = 700, 16, 2, 3, 20
BLOCKS = -(-LENGTH // BLOCK_SIZE)
AROUND_SPLITS = [0, 31, 32, 255, 256, 257, 288, 511, 512, 513, 699]


def paging(context, rows):
    ints = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    table = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).to(torch.int32)[None]
    return Paging(ints(0, rows), torch.zeros(rows, dtype=torch.int32), ints(context), table, BLOCK_SIZE, rows, context)


def inputs(dtype, int8=False):
    torch.manual_seed(0)
    q = torch.randn(LENGTH, KV_HEADS * GROUP, HEAD_DIM, dtype=dtype)
    caches = [torch.randn(BLOCKS * BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=dtype) for _ in range(2)]
    return q, *([packed_rows(cache) for cache in caches] if int8 else caches)


def chain(q, keys, values, context, rows, window):
    ancestors = (
        torch.arange(rows, dtype=torch.int32).repeat(rows, 1).masked_fill_(torch.ones(rows, rows).triu(1) > 0, -1)
    )
    return attention(
        q[context : context + rows], keys, values, paging(context, rows), ancestors, HEAD_DIM**-0.5, window
    )


@pytest.fixture(params=[0, 20, 300], ids=lambda window: f"window{window}")
def window(request):
    return request.param


@pytest.fixture(params=["float32", "bfloat16", "float32 over int8"])
def case(request, window):
    dtype, _, int8 = request.param.partition(" over ")
    q, keys, values = inputs(getattr(torch, dtype), bool(int8))
    return q, keys, values, attention_prefill(q, keys, values, paging(0, LENGTH), HEAD_DIM**-0.5, window)


@pytest.mark.parametrize("rows", [1, 2, 9, 16])
def test_decode_has_the_bits_of_prefill(case, rows, window):
    q, keys, values, want = case
    for context in AROUND_SPLITS:
        last = min(LENGTH, context + rows)
        got = chain(q, keys, values, context, last - context, window)
        assert bits(got) == bits(want[context:last]), context


@pytest.mark.parametrize("chunk", [1, 100, 256])
def test_chunks_have_the_bits_of_the_whole(case, chunk, window):
    q, keys, values, want = case
    for first in range(0, LENGTH, chunk) if chunk > 1 else AROUND_SPLITS:
        rows = min(chunk, LENGTH - first)
        got = attention_prefill(q[first : first + rows], keys, values, paging(first, rows), HEAD_DIM**-0.5, window)
        assert bits(got) == bits(want[first : first + rows]), first
