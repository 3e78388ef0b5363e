"""Policies are named, and compared within one run."""

import pytest

from lychee.runtime import alternate
from lychee.runtime.alternate import Sample, speeds
from lychee.runtime.controller import Fixed, Window
from lychee.runtime.metrics import RequestStats
from lychee.runtime.tree import TreeShape

AUTO = Fixed(TreeShape.chain(9))  # stands for the engine's own


@pytest.mark.parametrize(("name", "shape"), [("3", TreeShape.chain(3)), ("2,1", TreeShape.widths((2, 1)))])
def test_a_policy_is_a_length_or_a_tree(name, shape):
    assert alternate.controller_of(name, AUTO) == Fixed(shape)


def test_a_policy_has_a_name():
    assert alternate.controller_of("native", AUTO) is None
    assert alternate.controller_of("auto", AUTO) is AUTO
    assert isinstance(alternate.controller_of("window", AUTO), Window)


def test_the_ratio_is_of_the_same_run():
    median, low, high = alternate.ratio([10.0, 100.0, 1000.0], [5.0, 50.0, 500.0])
    assert (median, low, high) == (2.0, 2.0, 2.0)
    assert alternate.ratio([1.0, 2.0, 9.0], [1.0, 1.0, 1.0])[1:] == (1.0, 9.0)


def test_speeds_are_sums_of_tokens_over_sums_of_time_by_run():
    def sample(run, seconds, *tokens):
        stats = tuple(RequestStats(emitted=n) for n in tokens)
        return Sample("4", run, 0, seconds, (), stats)

    assert speeds([sample(0, 1.0, 10), sample(1, 2.0, 10, 10), sample(0, 3.0, 30)]) == [10.0, 10.0]
