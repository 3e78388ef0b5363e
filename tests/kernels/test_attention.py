"""Attention over trees and chunks: right against float64, and a row's bits its own whatever surrounds it."""

import functools
import itertools
import random
from dataclasses import dataclass, replace
from importlib import import_module

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lychee.kernels import attention, attention_prefill
from lychee.kernels.kv_store import token_slots
from lychee.kernels.samples import paging_to, sample_paging
from tests.conftest import DEVICE
from tests.kernels.harness import TOLERANCE

decode = import_module("lychee.kernels.attention")  # the package's name for it is the op
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NUM_KV_HEADS, GROUP, HEAD_DIM = 2, 3, 20
NAN = float("nan")


def launched(op, inputs):
    return op.run(inputs, op.contract.check(inputs))


FACES = {"launch": launched, "reference": lambda op, inputs: op.reference(**inputs)}


def naive(inputs, tokens_of_row):
    """softmax(scale * q k^T) v in float64, one row at a time; tokens_of_row(row, seq) lists the tokens it sees."""
    q, paging = inputs["q"].double(), inputs["paging"]
    slots = token_slots(paging.block_tables, paging.block_size)
    out = torch.empty_like(q)
    for row, seq in enumerate(paging.seq_idx.tolist()):
        seen = slots[seq, tokens_of_row(row, seq)].long()
        keys, values = (inputs[name].double()[seen] for name in ("k_cache", "v_cache"))
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // keys.shape[1])
            scores = inputs["scale"] * keys[:, kv_head] @ q[row, head]
            out[row, head] = scores.softmax(0) @ values[:, kv_head]
    return out


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 1, 3, 45, 64, 400])
@pytest.mark.parametrize("max_context", [0, 70, 300])
def test_a_row_attends_its_prefix_and_its_own_path(face, dtype, max_context, window):
    torch.manual_seed(max_context)
    inputs = attention.sample(
        dtype,
        DEVICE,
        num_seqs=3,
        max_nodes=12,
        max_context=max_context,
        block_size=4,
        num_kv_heads=2,
        group=3,
        head_dim=8,
        window=window,
    )
    contexts, paths = inputs["paging"].context_lens.tolist(), inputs["ancestors"].tolist()

    def path_tokens(row, seq):
        return [*range(contexts[seq]), *(contexts[seq] + node for node in paths[row] if node >= 0)][-window:]

    want = naive(inputs, path_tokens)
    torch.testing.assert_close(
        FACES[face](attention, inputs).double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 1, 3, 45, 64, 400])
@pytest.mark.parametrize(("max_rows", "max_context"), [(1, 40), (70, 0), (33, 45), (40, 300)])
def test_a_row_of_a_chunk_attends_the_positions_of_its_window_up_to_its_own(face, dtype, max_rows, max_context, window):
    torch.manual_seed(max_rows)
    inputs = attention_prefill.sample(
        dtype, DEVICE, num_seqs=2, max_rows=max_rows, max_context=max_context, block_size=16, num_kv_heads=2, group=3,
        head_dim=8, window=window,
    )  # fmt: skip
    first_rows, contexts = inputs["paging"].cu_seqlens_q.tolist(), inputs["paging"].context_lens.tolist()
    want = naive(inputs, lambda row, seq: range(contexts[seq] + row - first_rows[seq] + 1)[-window:])
    got = FACES[face](attention_prefill, inputs).double()
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("face", FACES)
def test_chunk_edges_do_not_change_a_prefill(face):
    torch.manual_seed(0)
    whole = attention_prefill.sample(
        torch.float32, DEVICE, num_seqs=1, max_rows=75, max_context=0, block_size=4, num_kv_heads=1, group=2, head_dim=8
    )
    want = FACES[face](attention_prefill, whole)
    edges = [0, 1, 32, 40, 75]
    for first, last in itertools.pairwise(edges):
        chunk = sample_paging([first], [last - first], [75], 4)
        paging = replace(chunk, block_tables=whole["paging"].block_tables)
        got = FACES[face](attention_prefill, {**whole, "q": whole["q"][first:last], "paging": paging})
        torch.testing.assert_close(got, want[first:last], rtol=1e-5, atol=1e-5)


@dataclass(frozen=True)
class Subject:
    """The row under test: its query, and the keys and values of positions up to its own."""

    q: torch.Tensor  # [num_heads, head_dim]
    kv: torch.Tensor  # [2, length, num_kv_heads, head_dim]


def subject_of(seed, length, dtype):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(NUM_KV_HEADS * GROUP, HEAD_DIM, generator=generator)
    return Subject(q.to(dtype), torch.randn(2, length, NUM_KV_HEADS, HEAD_DIM, generator=generator).to(dtype))


def result(subject, *, path, window=0, crowd=0, block_size=16, rng=None):
    """The subject's row, as node path[-1] of a tree where all that it does not see holds NaN, among `crowd` more rows.

    Half of the crowd are other nodes of the tree, the rest one-node trees before and after it.
    """
    rng = rng or random.Random(0)
    context = subject.kv.shape[1] - len(path)
    paths = {node: path[: depth + 1] for depth, node in enumerate(path)}
    for node in range(max(path) + 1 + crowd):
        if node not in paths:
            paths[node] = [*paths[rng.choice([parent for parent in path if parent < node])], node]
    company = rng.sample([node for node in paths if node != path[-1]], crowd // 2)
    tree = [paths[node] for node in sorted([*company, path[-1]])]
    others = [rng.randrange(60) for _ in range(crowd - crowd // 2)]
    seq = len(others) // 2
    contexts = [*others[:seq], context, *others[seq:]]
    trees = [*[[[0]]] * seq, tree, *[[[0]]] * (len(others) - seq)]
    nodes = [len(paths) if index == seq else 1 for index in range(len(trees))]

    rows = [path for tree in trees for path in tree]
    paging = sample_paging(
        contexts, [len(t) for t in trees], [c + n for c, n in zip(contexts, nodes, strict=True)], block_size
    )
    slots = token_slots(paging.block_tables, block_size)
    caches = torch.full((2, int(slots.max()) + 1, NUM_KV_HEADS, HEAD_DIM), NAN, dtype=subject.q.dtype)
    caches[:, slots[seq, [*range(context), *(context + node for node in path)]].long()] = subject.kv
    caches[:, slots[seq, [*range(context), *(context + node for node in path)][: -window or 0]].long()] = NAN
    row = seq + tree.index(path)
    q = torch.randn(len(rows), *subject.q.shape).to(subject.q.dtype)
    q[::3] = NAN
    q[row] = subject.q
    ancestors = torch.full((len(rows), max(len(path) for path in rows) + rng.randrange(3)), -1, dtype=torch.int32)
    for index, nodes_of_row in enumerate(rows):
        ancestors[index, : len(nodes_of_row)] = torch.tensor(nodes_of_row, dtype=torch.int32)
    k_cache, v_cache = caches.to(DEVICE)
    inputs = {
        "q": q.to(DEVICE),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "paging": paging_to(paging, DEVICE),
        "ancestors": ancestors.to(DEVICE),
        "scale": HEAD_DIM**-0.5,
        "window": window,
    }
    return launched(attention, inputs)[row].cpu()


SMALL, SHIPPED = (16, 2), (decode.TILE, decode.SPLIT)


def same_bits(monkeypatch, tiles, dtype, crowd, examples):
    """Draws trees, crowds and block sizes around the subject, and compares it with itself decoded plainly and alone."""
    tile, span = tiles[0], tiles[0] * tiles[1]
    monkeypatch.setattr(decode, "TILE", tiles[0])
    monkeypatch.setattr(decode, "SPLIT", tiles[1])
    lengths = [1, tile - 1, tile, tile + 1, 2 * tile + 5, span - 1, span, span + 1, span + tile + 1, 2 * span + 3]

    @functools.lru_cache
    def plain(seed, length, window):
        return result(subject_of(seed, length, dtype), path=[0], window=window)

    @settings(max_examples=examples, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(data=st.data())
    def check(data):
        length = data.draw(st.sampled_from(lengths), label="length")
        depth = data.draw(st.integers(1, min(length, tile + 4)), label="path length")
        gaps = data.draw(st.lists(st.integers(1, 3), min_size=depth - 1, max_size=depth - 1), label="gaps")
        seed = data.draw(st.integers(0, 2), label="seed")
        window = data.draw(st.sampled_from([0, 0, 3, tile, tile + 5, span + 3]), label="window")
        monkeypatch.setattr(decode, "CPU_ALONE", data.draw(st.sampled_from([-1, 1 << 14]), label="alone up to"))
        got = result(
            subject_of(seed, length, dtype),
            path=[sum(gaps[:node]) for node in range(depth)],
            window=window,
            crowd=crowd,
            block_size=data.draw(st.sampled_from([1, 4, 16]), label="block_size"),
            rng=random.Random(data.draw(st.integers(0, 9), label="crowd seed")),
        )
        assert torch.isfinite(got).all()
        assert torch.equal(got, plain(seed, length, window))

    check()


BITWISE = [
    (torch.float32, SMALL, 0, 60),
    (torch.float32, SMALL, 14, 20),
    (torch.float32, SMALL, 39, 10),
    (torch.float32, SHIPPED, 0, 30),
    (torch.float16, SMALL, 14, 20),
    (torch.float16, SHIPPED, 39, 10),
    (torch.bfloat16, SMALL, 14, 20),
    (torch.bfloat16, SHIPPED, 39, 10),
]


@pytest.mark.parametrize(("dtype", "tiles", "crowd", "examples"), BITWISE, ids=str)
def test_a_row_has_the_same_bits_in_any_tree_and_any_crowd(monkeypatch, dtype, tiles, crowd, examples):
    same_bits(monkeypatch, tiles, dtype, crowd, examples)


@pytest.mark.slow
@pytest.mark.parametrize("crowd", [0, 14, 39, 199])
@pytest.mark.parametrize("tiles", [SMALL, SHIPPED], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_many_trees_and_crowds(monkeypatch, dtype, tiles, crowd):
    same_bits(monkeypatch, tiles, dtype, crowd, 2000 // (crowd + 10))
