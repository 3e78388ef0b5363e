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


def keeping(num_blocks, *keys):
    """A pool that keeps a block under each key, released in this order."""
    pool = BlockPool(num_blocks, 16, keeps=True)
    for block, key in zip(blocks := pool.allocate(len(keys)), keys, strict=True):
        pool.publish(block, key)
    pool.release(blocks)
    return pool


def test_a_kept_block_is_found_until_it_is_needed_and_those_out_of_use_for_longest_go_first():
    pool = keeping(4, b"a", b"b", b"c")
    assert pool.num_free == 4
    pool.release(pool.share([pool.find(b"a")]))
    pool.allocate(2)  # the free one, and b
    assert [pool.find(key) is None for key in (b"a", b"b", b"c")] == [False, True, False]
    pool.allocate(1)
    assert [pool.find(key) is None for key in (b"a", b"b", b"c")] == [False, True, True]
    assert pool.num_free == 1


def test_a_block_in_use_is_never_evicted():
    pool = keeping(2, b"a", b"b")
    used = pool.share([pool.find(b"a")])
    pool.allocate(1)
    with pytest.raises(MemoryError, match="1 KV blocks asked for, 0 of 2 free"):
        pool.allocate(1)
    assert [pool.find(b"a")] == used


def test_a_block_that_is_claimed_is_found_no_more_and_may_be_published_again():
    pool = keeping(2, b"a")
    block = pool.find(b"a")
    pool.claim(block)
    assert pool.find(b"a") is None
    pool.publish(block, b"a")
    pool.release([block])
    assert pool.find(b"a") == block
    assert pool.num_free == 2


def test_one_block_has_a_key_and_the_other_goes_when_it_is_released():
    pool = keeping(3, b"a")
    kept, (other,) = pool.find(b"a"), pool.allocate(1)
    pool.publish(other, b"a")
    pool.release([other])
    assert pool.find(b"a") == kept
    assert not pool.is_idle(other)


def test_what_the_draft_has_is_forgotten_with_the_block():
    pool = keeping(1, b"a")
    pool.drafted[pool.find(b"a")] = 16
    (block,) = pool.allocate(1)
    assert pool.drafted[block] == 0


def test_without_keeping_a_published_block_goes_with_its_last_reference():
    pool = BlockPool(1, 16)
    (block,) = pool.allocate(1)
    pool.publish(block, b"a")
    pool.share([block])
    pool.release([block])
    assert pool.find(b"a") == block
    pool.release([block])
    assert pool.find(b"a") is None
    with pytest.raises(ValueError, match="is free and cannot be published"):
        pool.publish(block, b"a")


def test_all_is_forgotten_when_asked():
    pool = keeping(3, b"a", b"b")
    pool.forget()
    assert pool.find(b"a") is pool.find(b"b") is None
    assert sorted(pool.allocate(3)) == [0, 1, 2]


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
