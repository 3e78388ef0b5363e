"""The block pool never loses, doubles or leaks a block."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lychee.runtime.blocks import BlockPool


def test_a_shared_block_is_freed_by_its_last_release():
    pool = BlockPool(2, 16)
    blocks = pool.allocate(2)
    pool.share(blocks[:1])
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks[:1])
    assert pool.num_free == 2


def test_allocating_too_much_takes_nothing():
    pool = BlockPool(3, 16)
    with pytest.raises(MemoryError, match="4 KV blocks asked for, 3 of 3 free"):
        pool.allocate(4)
    assert pool.num_free == 3


def test_a_double_release_is_refused():
    pool = BlockPool(1, 16)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="released twice"):
        pool.release(blocks)


def test_a_free_block_cannot_be_shared():
    with pytest.raises(ValueError, match="is free"):
        BlockPool(1, 16).share([0])


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 9)), max_size=60))
def test_reference_counts_return_to_zero_under_a_random_schedule(actions):
    pool, held = BlockPool(8, 4), []
    for action, number in actions:
        if action == "allocate" and number <= pool.num_free:
            taken = pool.allocate(number)
            assert not set(taken) & {b for group in held for b in group}
            held.append(taken)
        elif action == "share" and held:
            held.append(pool.share(held[number % len(held)]))
        elif action == "release" and held:
            pool.release(held.pop(number % len(held)))
        assert pool.num_free == 8 - len({b for group in held for b in group})
    for group in held:
        pool.release(group)
    assert pool.num_free == 8
