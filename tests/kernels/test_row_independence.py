"""A row's bits are its own: the same alone, among 15 and among 200 others, at any place, for every op.

This is what makes speculation exact: a row verified in a tree is the row that plain decoding computes.
"""

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from lychee.kernels import OPS, attention, attention_prefill, commit_kv, rope_store, take_tokens
from tests.conftest import DEVICE
from tests.kernels.batches import bits, bounds, changed, rows_of, sequences_of

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
CROWDS = (0, 15, 200)
EVERYONE = CROWDS[-1] + 1


def shapes(**axes: tuple[int, ...]) -> list[dict[str, int]]:
    return [dict(zip(axes, values, strict=True)) for values in zip(*axes.values(), strict=True)]


# The third has contexts of several splits, and so have the windows of the last.
HEADS = shapes(
    max_context=(70, 45, 600, 70, 600),
    block_size=(16, 3, 16, 16, 16),
    num_kv_heads=(3, 1, 2, 1, 2),
    group=(3, 1, 2, 3, 2),
    head_dim=(64, 20, 8, 8, 8),
    window=(0, 0, 0, 33, 300),
    int8_cache=(0, 1, 1, 0, 1),
)
INT8 = shapes(in_features=(33, 300, 576), out_features=(9, 70, 192), has_bias=(0, 1, 1), grouped=(0, 1, 1))
INT4 = shapes(
    in_features=(64, 128, 576),
    out_features=(9, 70, 192),
    has_bias=(0, 1, 1),
    group_kind=(1, 2, 0),
    has_minimums=(1, 0, 1),
    exact_scales=(1, 0, 0),
)
BY_ROW = {
    "philox": [{}],
    "draw": shapes(vocab=(1, 1025, 4097), num_samples=(1, 3, 2), replacement=(0, 1, 0)),
    "embed": shapes(model_vocab=(50, 300), hidden=(1, 200)),
    "embed_int8": shapes(model_vocab=(50, 300), hidden=(33, 200), grouped=(0, 1)),
    "embed_int4": shapes(model_vocab=(50, 300), hidden=(33, 200), has_minimums=(0, 1)),
    "gated_linear": shapes(in_features=(33, 384, 576), out_features=(9, 1056, 70), has_bias=(1, 0, 1)),
    "gated_linear_int8": shapes(in_features=(33, 576), out_features=(70, 192), has_bias=(1, 0)),
    "linear": shapes(in_features=(1, 33, 300, 576), out_features=(9, 150, 70, 192), has_bias=(0, 1, 0, 1)),
    "linear_prefill": shapes(in_features=(1, 33, 300, 576), out_features=(9, 150, 70, 192), has_bias=(0, 1, 0, 1)),
    "lm_head": shapes(in_features=(33, 576), out_features=(1000, 257)),
    "linear_int8": INT8,
    "linear_int8_prefill": INT8,
    "lm_head_int8": [{axis: n for axis, n in sizes.items() if axis != "has_bias"} for sizes in INT8],
    "linear_int4": INT4,
    "linear_int4_prefill": INT4,
    "lm_head_int4": [{axis: n for axis, n in sizes.items() if axis != "has_bias"} for sizes in INT4],
    "process_logits": shapes(num_seqs=(3, 9), vocab=(65, 4099), padding=(0, 3), has_counts=(1, 0)),
    "rms_norm": shapes(hidden=(1, 100, 576)),
    "add_rms_norm": shapes(hidden=(1, 100, 576)),
    "rope_store": shapes(
        num_heads=(5, 1),
        num_kv_heads=(3, 1),
        head_dim=(64, 20),
        num_slots=(EVERYONE,) * 2,
        num_positions=(40, 40),
        int8_cache=(1, 0),
    ),
    "confidence": shapes(vocab=(65, 4099), padding=(0, 3)),
    "spread_logits": shapes(num_outputs=(1, 50), model_vocab=(300, 4099)),
    "swiglu": shapes(intermediate=(1, 300, 1536)),
}
BY_SEQUENCE = {
    "accept_coupled": shapes(max_nodes=(7, 33), max_path=(3, 9)),
    "accept_rejection": shapes(max_nodes=(7, 4), vocab=(65, 2049)),
    "accept_traversal": shapes(max_nodes=(7, 4), vocab=(65, 2049)),
    "attention": [{**heads, "max_nodes": 5} for heads in HEADS],
    "attention_prefill": [{**heads, "max_rows": 9} for heads in HEADS],
}
# They copy and compute nothing; test_commit_kv.py and the generic test are their tests.
MEANINGLESS = {commit_kv.name, take_tokens.name}


def test_every_op_is_here():
    assert BY_ROW.keys() | BY_SEQUENCE.keys() | MEANINGLESS == OPS.keys()


@dataclass(frozen=True)
class Subject:
    """One row or sequence of a batch, and where it stands there."""

    op: object
    inputs: dict
    place: int

    def result(self) -> list[bytes]:
        """The bits of all that the op writes for it."""
        inputs = copy.deepcopy(self.inputs)
        outputs = self.op.run(inputs, self.op.contract.check(inputs))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        found = []
        for spec, output in zip(self.op.contract.outputs, outputs, strict=True):
            by_row = self.op.name in BY_SEQUENCE and spec.parsed[0][0] != "num_seqs"
            rows = slice(*bounds(inputs)[self.place : self.place + 2]) if by_row else self.place
            found.append(bits(output[rows]))
        if self.op is rope_store and (slot := int(inputs["slot_mapping"][self.place])) >= 0:
            found += [bits(inputs[cache][slot]) for cache in ("k_cache", "v_cache")]
        return found


def companies(subject: int) -> Iterator[tuple[list[int], int]]:
    """Batches out of everyone that hold the subject, and its place there."""
    others = [i for i in range(EVERYONE) if i != subject]
    for size in CROWDS:
        crowd = random.Random(size).sample(others, size)
        for place in sorted({0, size // 2, size}):
            yield [*crowd[:place], subject, *crowd[place:]], place


@DTYPES
@pytest.mark.parametrize("name", BY_ROW)
def test_a_row_has_the_same_bits_in_any_batch(name, dtype):
    op = OPS[name]
    for sizes in BY_ROW[name]:
        torch.manual_seed(0)
        rows_axis = "num_rows" if "num_rows" in op.axes else "num_tokens"
        everyone = op.sample(dtype, DEVICE, **{rows_axis: EVERYONE}, **sizes)
        for row in (0, 100):
            want = Subject(op, rows_of(op, everyone, [row]), 0).result()
            for batch, place in companies(row):
                assert Subject(op, rows_of(op, everyone, batch), place).result() == want, (sizes, len(batch), place)


@DTYPES
@pytest.mark.parametrize("name", BY_SEQUENCE)
def test_a_sequence_has_the_same_bits_in_any_batch(name, dtype):
    op = OPS[name]
    for sizes in BY_SEQUENCE[name]:
        torch.manual_seed(0)
        everyone = op.sample(dtype, DEVICE, num_seqs=EVERYONE, **sizes)
        for seq in (0, 100):
            want = Subject(op, sequences_of(op, everyone, [seq]), 0).result()
            for batch, place in companies(seq):
                got = Subject(op, sequences_of(op, everyone, batch), place).result()
                assert got == want, (sizes, len(batch), place)


def launched(op, inputs):
    return op.run(inputs, op.contract.check(inputs))


@DTYPES
def test_a_node_has_the_same_bits_whichever_of_its_tree_are_asked_for(dtype):
    for heads in HEADS:
        torch.manual_seed(1)
        tree = attention.sample(dtype, DEVICE, num_seqs=1, max_nodes=40, **heads)
        want = launched(attention, tree)
        for size in (1, 2, 7, 16):
            for seed in range(3):
                nodes = sorted(random.Random(seed).sample(range(len(want)), size))
                got = launched(attention, sequences_of(attention, tree, [0], [nodes]))
                assert bits(got) == bits(want[nodes]), (heads, nodes)


def chunk_of(whole, seq, first, last):
    """Rows first .. last of a sequence whose earlier rows are in the cache already."""
    chunk = sequences_of(attention_prefill, whole, [seq], [list(range(first, last))])
    context = chunk["paging"].context_lens + first
    return changed(changed(chunk, "paging.context_lens", context), "paging.max_context", int(context))


@DTYPES
@pytest.mark.parametrize("edges", [[0, 1, 75], [0, 32, 64, 75], [0, 40, 74, 75], list(range(76))], ids=len)
def test_a_prefill_in_chunks_has_the_bits_of_the_whole(edges, dtype):
    for heads in HEADS:
        torch.manual_seed(2)
        whole = attention_prefill.sample(dtype, DEVICE, num_seqs=1, max_rows=75, **heads)
        want = launched(attention_prefill, whole)
        for first, last in pairwise(edges):
            got = launched(attention_prefill, chunk_of(whole, 0, first, last))
            assert bits(got) == bits(want[first:last]), (heads, first, last)


@DTYPES
def test_a_decoded_row_has_the_bits_of_the_prefilled_one(dtype):
    """Up to the first split of the prefix: decoding merges the states of splits, prefill folds on."""
    for heads in HEADS[:2]:
        torch.manual_seed(3)
        whole = attention_prefill.sample(dtype, DEVICE, num_seqs=1, max_rows=75, **heads)
        want = launched(attention_prefill, whole)
        for row in (0, 1, 31, 32, 74):
            chunk = chunk_of(whole, 0, row, row + 1)
            root = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
            assert bits(launched(attention, {**chunk, "ancestors": root})) == bits(want[row : row + 1]), (heads, row)


FEW = {"linear": {"has_bias": 1}, "linear_int8": {"has_bias": 0, "grouped": 0}}
FEW["linear_int4"] = {"has_bias": 0, "group_kind": 0, "has_minimums": 1, "exact_scales": 1}


@pytest.mark.parametrize("name", FEW)
def test_few_rows_have_the_bits_that_they_have_among_many(name):
    """The CPU has a kernel for each number of rows up to 16, and one for all others."""
    torch.manual_seed(4)
    inputs = OPS[name].sample(torch.float32, DEVICE, num_tokens=21, in_features=192, out_features=50, **FEW[name])
    want = launched(OPS[name], inputs)
    torch.testing.assert_close(want, OPS[name].reference(**inputs), rtol=1e-4, atol=1e-4)
    for rows in (1, 2, 3, 5, 7, 8, 9, 16):
        assert bits(launched(OPS[name], {**inputs, "x": inputs["x"][:rows].contiguous()})) == bits(want[:rows]), rows


def test_a_row_whose_order_depends_on_the_batch_is_found(monkeypatch):
    shipped = OPS["linear"].launch

    def by_batch(y, x, weight, bias=None):
        if len(x) < 100:
            shipped(y, x, weight, bias)
        else:
            shipped(y, x.flip(1).contiguous(), weight.flip(1).contiguous(), bias)

    monkeypatch.setattr(OPS["linear"], "launch", by_batch)
    with pytest.raises(AssertionError):
        test_a_row_has_the_same_bits_in_any_batch("linear", torch.float32)


def test_subjects_that_differ_are_told_apart():
    """The comparison above sees a change of one bit, in an output and in what is written in place."""
    torch.manual_seed(0)
    inputs = rope_store.sample(
        torch.float32, DEVICE, num_tokens=3, num_heads=1, num_kv_heads=1, head_dim=4, num_slots=5, num_positions=9
    )
    inputs["slot_mapping"][:] = torch.tensor([2, 0, 4])
    want = Subject(rope_store, inputs, 1).result()
    assert len(want) == 3
    inputs["v"][1, 0, 0] = torch.nextafter(inputs["v"][1, 0, 0], torch.tensor(torch.inf))
    assert [a == b for a, b in zip(want, Subject(rope_store, inputs, 1).result(), strict=True)] == [True, True, False]
