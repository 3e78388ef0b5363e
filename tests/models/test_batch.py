"""Batches: what is derived from tokens, parents, context lengths and block tables."""

import numpy as np
import pytest
import torch

from lychee.models.batch import Batch


def slot(table, position, block_size):
    return table[position // block_size] * block_size + position % block_size


def test_prefill_rows_are_the_positions_after_the_context():
    tables = [[7, 2, 5], [0, 9]]
    batch = Batch.prefill([[10, 11, 12], [20]], [6, 0], tables, 4)
    assert not batch.is_decode
    assert batch.tokens.tolist() == [10, 11, 12, 20]
    assert batch.positions.tolist() == [6, 7, 8, 0]
    assert batch.slot_mapping.tolist() == [slot(tables[0], p, 4) for p in (6, 7, 8)] + [0]
    assert batch.paging.cu_seqlens_q.tolist() == [0, 3, 4]
    assert batch.paging.seq_idx.tolist() == [0, 0, 0, 1]
    assert batch.paging.context_lens.tolist() == [6, 0]
    assert batch.paging.block_tables.tolist() == [[7, 2, 5], [0, 9, 0]]
    assert (batch.paging.block_size, batch.paging.max_rows, batch.paging.max_context) == (4, 3, 6)
    assert batch.logit_rows is None


def test_tree_rows_have_the_slot_of_their_node_and_the_position_of_their_depth():
    #        0          sequence 1 is plain decoding
    #      1   3
    #     2   4 5
    tables = [[3, 1, 4], [6]]
    batch = Batch.decode([[9, 8, 7, 6, 5, 4], [3]], [[-1, 0, 1, 0, 3, 3], [-1]], [5, 2], tables, 4)
    assert batch.is_decode
    assert batch.positions.tolist() == [5, 6, 7, 6, 7, 7, 2]
    assert batch.slot_mapping.tolist() == [slot(tables[0], 5 + i, 4) for i in range(6)] + [slot(tables[1], 2, 4)]
    assert batch.ancestors.tolist() == [
        [0, -1, -1],
        [0, 1, -1],
        [0, 1, 2],
        [0, 3, -1],
        [0, 3, 4],
        [0, 3, 5],
        [0, -1, -1],
    ]


def test_a_chain_is_causal():
    batch = Batch.decode([[1, 2, 3, 4]], [[-1, 0, 1, 2]], [10], [[0]], 16)
    lower = np.where(np.tril(np.ones((4, 4))) > 0, np.arange(4), -1)
    assert batch.ancestors.tolist() == lower.tolist()
    assert batch.positions.tolist() == [10, 11, 12, 13]


def test_random_trees_equal_a_walk_from_each_node_to_its_root():
    rng = np.random.default_rng(0)
    for _ in range(30):
        parents = [[-1] + [int(rng.integers(0, i)) for i in range(1, n)] for n in rng.integers(1, 20, size=3)]
        contexts = rng.integers(0, 30, size=3).tolist()
        tokens = [list(range(len(p))) for p in parents]
        batch = Batch.decode(tokens, parents, contexts, [list(range(7))] * 3, 8)
        row = 0
        for tree, context in zip(parents, contexts, strict=True):
            for node in range(len(tree)):
                path, at = [], node
                while at >= 0:
                    path.insert(0, at)
                    at = tree[at]
                kept = [a for a in batch.ancestors[row].tolist() if a >= 0]
                assert kept == path == batch.ancestors[row, : len(path)].tolist()
                assert batch.positions[row] == context + len(path) - 1
                row += 1
        assert batch.ancestors.shape == (row, max(batch.ancestors.ge(0).sum(1)))


@pytest.mark.parametrize("rows", [None, [], [0, 3]])
def test_logit_rows_are_kept_as_given(rows):
    batch = Batch.prefill([[1, 2, 3, 4]], [0], [[0]], 4, logit_rows=rows)
    assert (None if batch.logit_rows is None else batch.logit_rows.tolist()) == rows


def test_every_index_is_int32_and_contiguous():
    batch = Batch.decode([[1, 2]], [[-1, 0]], [3], [np.array([5, 1], np.int64)], 4, logit_rows=[1])
    tensors = [batch.tokens, batch.positions, batch.slot_mapping, batch.ancestors, batch.logit_rows]
    paging = batch.paging
    for tensor in [*tensors, paging.cu_seqlens_q, paging.seq_idx, paging.context_lens, paging.block_tables]:
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


@pytest.mark.parametrize("parents", [[0, 0], [-1, 1], [-1, -1], [-1, -2], [-1], [-1, 0, 1]])
def test_a_broken_tree_is_refused(parents):
    with pytest.raises(ValueError, match="parents must give -1 for each tree's first node"):
        Batch.decode([[1, 2]], [parents], [0], [[0]], 4)


def test_too_few_blocks_are_refused_naming_the_sequence():
    Batch.prefill([[1, 2], [1, 2]], [2, 6], [[0], [1, 2]], 4)
    with pytest.raises(ValueError, match=r"block_tables\[1\] has 2 blocks of 4 slots, 9 slots are needed"):
        Batch.prefill([[1, 2], [1, 2]], [2, 7], [[0], [1, 2]], 4)


@pytest.mark.parametrize("parents", [[(0,)], [(-1, -1)], [()]])
def test_a_lone_row_that_is_no_root_is_refused(parents):
    with pytest.raises(ValueError, match="parents must give -1"):
        Batch.decode([[5]], parents, [3], [[0]], 16)
