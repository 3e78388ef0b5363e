"""Costs follow what rounds take: by rows where they were run, in proportion where they were not, outliers left out."""

import pytest

from lychee.runtime.cost_table import CostTable, Curve
from lychee.runtime.measure import line
from lychee.runtime.round_times import LEAST, RoundTimes
from lychee.runtime.tree import ProposedTree, TreeShape

BASE = CostTable(Curve(((1, 4.0), (4, 5.0), (8, 9.0))), Curve(((1, 0.5), (4, 0.8))), 0.2, 1.0)


def drafted(length, levels=None):
    levels = length if levels is None else levels
    tokens = [5] * (levels + 1) + [-1] * (length - levels)
    return (ProposedTree(TreeShape.chain(length), tuple(tokens), levels),)


def test_without_rounds_the_table_is_the_one_that_was_measured():
    assert RoundTimes(BASE).table() == BASE


def test_a_round_that_came_often_costs_what_it_took_and_others_are_dearer_too():
    """By a share and by what each costs alike, half and half: which it is, rounds of one kind do not say."""
    times = RoundTimes(BASE)
    for _ in range(500):
        times.add(drafted(3), 2 * (1.0 + 3 * 0.5), 15.0, BASE.overhead)
    table = times.table()
    assert table.verify(4) == pytest.approx(15.0)
    assert table.verify(8) == pytest.approx(5.0 + 2 * 9.0, rel=0.01)
    assert (table.drafting, table.draft(1)) == pytest.approx((1.25 + 1.5, 0.75), rel=0.01)
    assert table.overhead == BASE.overhead


@pytest.mark.parametrize(("begin", "share"), [(2.0, 1.0), (0.0, 1.5), (0.5, 0.7)])
def test_rounds_of_two_kinds_tell_a_slower_machine_from_requests_that_ask_for_more(begin, share):
    times = RoundTimes(BASE)
    for length in (1, 7):
        for _ in range(500):
            times.add(
                drafted(length),
                begin + share * (1.0 + length * 0.5),
                begin + share * BASE.verify(length + 1),
                BASE.overhead,
            )
    table = times.table()
    assert table.verify(4) == pytest.approx(begin + share * 5.0, rel=0.05)
    assert table.drafting + 3 * table.draft(1) == pytest.approx(begin + share * (1.0 + 3 * 0.5), rel=0.05)


def test_what_the_host_does_besides_is_taken_from_rounds_too():
    times = RoundTimes(BASE)
    for number in range(40):
        times.add(drafted(3), 1.0 + 3 * 0.5, 5.0, 0.7 if number % 4 else 30.0)
    assert times.table().overhead == pytest.approx(0.7)


def test_few_rounds_and_rounds_in_which_a_program_was_made_change_nothing():
    times = RoundTimes(BASE)
    for _ in range(LEAST - 1):
        times.add(drafted(7), 100.0, 100.0, BASE.overhead)
    assert times.table() == BASE
    for _ in range(30):
        times.add(drafted(7), 1.0 + 7 * 0.5, 9.0, BASE.overhead)
    for _ in range(10):
        times.add(drafted(7), 500.0, 500.0, BASE.overhead)
    assert times.table().verify(8) == pytest.approx(9.0)
    assert times.table().draft(1) == pytest.approx(0.5)


def test_costs_are_those_of_the_last_rounds_and_what_did_not_come_among_them_is_scaled_with_them():
    times = RoundTimes(BASE)
    for slow, length in ((3.0, 3), (1.5, 7)):
        for _ in range(LEAST):
            times.add(drafted(length), slow * (1.0 + length * 0.5), slow * BASE.verify(length + 1), BASE.overhead)
        table = times.table()
    assert table.verify(8) == pytest.approx(13.5)
    assert table.verify(4) == pytest.approx(7.5, rel=0.1)
    assert table.drafting + 7 * table.draft(1) == pytest.approx(1.5 * 4.5, rel=0.1)
    times.add(drafted(7), 1.0, 1.0, BASE.overhead)
    assert times.table() == table


def test_what_was_not_drafted_is_not_counted():
    times = RoundTimes(BASE)
    for _ in range(LEAST):
        times.add(drafted(7, levels=3), 1.0 + 3 * 0.5, 10.0, BASE.overhead)
    assert times.table().verify(4) == pytest.approx(10.0)
    assert times.table().draft(1) == pytest.approx(0.5)


def test_native_rounds_say_nothing_of_drafting():
    times = RoundTimes(BASE)
    for _ in range(LEAST):
        times.add(drafted(0), 0.0, 8.0, BASE.overhead)
    assert times.table().verify(1) == pytest.approx(8.0)
    assert times.table().drafting == BASE.drafting


def test_a_chain_s_drafting_is_a_beginning_and_levels():
    assert line([(1, 1.5), (3, 2.5), (7, 4.5)]) == pytest.approx((1.0, 0.5))
    assert line([(1, 1.0)]) == (0.5, 0.5)


def test_what_is_thought_too_dear_costs_no_more_than_the_line_between_what_ran():
    """It would else never run, and stay so; what the base has cheaper, as before a step, stays cheaper."""
    dear = CostTable(Curve(((1, 1.0), (2, 1.2), (4, 9.0), (6, 9.1), (8, 9.2))), Curve(((1, 0.1),)))
    times = RoundTimes(dear)
    for length, took in ((1, 1.2), (7, 2.4)):
        for _ in range(50):
            times.add(drafted(length), 0.1 * length, took, BASE.overhead)
    table = times.table()
    assert [table.verify(rows) for rows in (2, 5, 8)] == pytest.approx([1.2, 1.8, 2.4])
    stepped = CostTable(Curve(((1, 1.0), (2, 1.0), (7, 1.1), (8, 3.0))), Curve(((1, 0.1),)))
    times = RoundTimes(stepped)
    for length, took in ((1, 1.0), (7, 3.0)):
        for _ in range(50):
            times.add(drafted(length), 0.1 * length, took, BASE.overhead)
    assert times.table().verify(7) < 1.2
