"""Values that are needed at the same time share no byte of the arena, and others do."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lychee.compiler.memory import ALIGNMENT, Need, assign


def rounded(num_bytes):
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


needs = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 20), st.integers(0, 6)).map(lambda n: Need(n[0], n[1], n[1] + n[2]))
)


@given(needs)
def test_what_is_needed_at_one_step_is_apart(needs):
    offsets, total = assign(needs)
    for step in range(30):
        spans = sorted(
            (at, at + n.num_bytes) for at, n in zip(offsets, needs, strict=True) if n.first <= step <= n.last
        )
        spans = [span for span in spans if span[0] < span[1]]
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert all(begin % ALIGNMENT == 0 and end <= total for begin, end in spans)


@given(needs)
def test_no_more_is_taken_than_all_of_them_need(needs):
    assert assign(needs)[1] <= sum(rounded(n.num_bytes) for n in needs)


@given(st.lists(st.integers(1, 300), min_size=1))
def test_three_of_the_largest_hold_a_chain_of_values_however_long(sizes):
    needs = [Need(size, step, step + 1) for step, size in enumerate(sizes)]
    assert assign(needs)[1] <= 3 * max(map(rounded, sizes))


def test_a_gap_is_used_again():
    assert assign([Need(64, 0, 9), Need(64, 0, 1), Need(64, 0, 9), Need(10, 2, 3)]) == ([0, 64, 128, 64], 192)
