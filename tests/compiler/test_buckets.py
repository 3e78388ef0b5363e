"""Programs are lowered when they have come a few times at the same sizes, and the last of them are kept."""

from lychee.compiler import Buckets
from tests.compiler.test_lower import PROGRAM, Tokens, blocks, run, some
from tests.kernels.batches import bits


def lowered(buckets, count, name="blocks"):
    return buckets.lowered(name, lambda: PROGRAM, {"num_tokens": count})


def test_a_program_is_lowered_when_it_has_come_a_few_times():
    buckets = Buckets(after=2)
    found = [lowered(buckets, 2) for _ in range(4)]
    assert [x is not None for x in found] == [False, False, True, True]
    assert found[2] is found[3]
    assert lowered(buckets, 3) is None
    assert lowered(buckets, 2, "others") is None


def test_a_program_that_is_not_lowered_is_not_made():
    assert Buckets(after=1).lowered("never", lambda: 1 / 0, {}) is None


def test_their_number_is_bounded_and_what_was_not_used_for_longest_goes():
    buckets = Buckets(after=0, kept=3)
    first = lowered(buckets, 1)
    for count in (2, 3):
        lowered(buckets, count)
    assert lowered(buckets, 1) is first
    for count in (2, 4, 5):
        lowered(buckets, count)
    assert len(buckets) == 3
    assert lowered(buckets, 1) is not first


def test_those_that_share_an_arena_compute_by_turns():
    buckets = Buckets(after=0)
    for seed, count in enumerate([3, 9, 2, 9, 3, 70, 3]):
        tokens = some(count, seed)
        assert bits(run(lowered(buckets, count), tokens)) == bits(blocks(Tokens(tokens)))


def test_programs_of_growing_sizes_lie_in_few_arenas():
    """Else each would keep one of its own: memory would grow with the square of the most requests at once."""
    buckets = Buckets(after=0)
    arenas = {id(arena): len(arena) for arena in (lowered(buckets, count).arena for count in range(1, 65))}
    assert len(arenas) <= 8
    assert sum(arenas.values()) <= 2 * max(arenas.values())
