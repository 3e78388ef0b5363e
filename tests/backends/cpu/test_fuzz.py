"""Random kernels give the same memory compiled for the CPU and in Triton's interpreter."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, assume, given, seed, settings

from tests.backends.cpu.fuzz.control import programs
from tests.backends.cpu.fuzz.kinds import FLOATS, INTS
from tests.backends.cpu.fuzz.pair import Pair, Worker, compare
from tests.backends.cpu.fuzz.program import Buffer, Pointer, Program

FIRST_SEED = int(os.environ.get("FUZZ_SEED", "0"))  # another number, other programs


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with Pair() as workers:
        yield workers


def agree(pair: Pair, count: int, number: int) -> None:
    """Checks so many programs; where one fails, hypothesis makes it small and prints it."""
    drawn: set[str] = set()

    @seed(FIRST_SEED + number)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(programs())
    def check(program: Program) -> None:
        if len(drawn) < count:  # hypothesis repeats itself while it draws, and must while it shrinks
            assume(program.source not in drawn)
        pair.check(program)
        drawn.add(program.source)

    check()


def test_random_kernels_agree_with_the_interpreter(pair: Pair) -> None:
    agree(pair, 60, 0)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 26))
def test_many_random_kernels_agree_with_the_interpreter(pair: Pair, number: int) -> None:
    """2,000 programs; a seed is 80 of them."""
    agree(pair, 80, number)


def test_random_kernels_agree_when_threads_share_the_grid() -> None:
    with Pair(compiled=Worker("compiled", threads=2)) as workers:
        agree(workers, 15, 26)


COUNTING = """
import triton
import triton.language as tl


@triton.jit
def kernel(x, n):
    at = tl.arange(0, 8)
    tl.store(x + at, tl.load(x + at, mask=at < n, other=0) + {added}, mask=at < {end})
"""


def counting(added: str = "1", end: str = "n") -> Program:
    return Program(COUNTING.format(added=added, end=end), (Buffer("i32", 5, 7),), (Pointer(0), 5), (), (1, 1, 1))


def test_a_worker_outlives_a_program_that_kills_it(pair: Pair) -> None:
    """A write to the inaccessible page beside a buffer ends the process; the next program gets a new one."""
    pair.compiled.send(counting(end="n + 1"))
    assert pair.compiled.receive() == ([], "the process died with code -11")
    pair.check(counting())


def test_a_difference_of_one_is_a_difference(pair: Pair) -> None:
    pair.compiled.send(counting("2"))
    pair.interpreted.send(counting("1"))
    got, want = pair.compiled.receive(), pair.interpreted.receive()
    assert got[1] == want[1] == ""
    with pytest.raises(AssertionError):
        compare(Buffer("i32", 5, 7), got[0][0], want[0][0])


def test_drawn_programs_use_what_the_fuzzer_is_for() -> None:
    """The generator can lose a feature without anything failing: so many draws must show each of these."""
    needed = [
        "for ",
        "while ",
        "if ",
        "else:",
        "tl.dot(",
        "tl.sum(",
        "tl.argmax(",
        "tl.associative_scan(",
        "tl.reduce(",
    ]
    needed += ["tl.trans(", "tl.reshape(", "tl.join(", "tl.interleave(", "tl.split(", "tl.sort(", "tl.atomic_add("]
    needed += ["mask=", "other=", "tl.expand_dims(", "tl.umulhi(", "ordered(", "acc"]
    needed += [f"tl.{kind.triton}" for kind in (*FLOATS, *INTS)]
    seen: set[str] = set()
    aliased = 0

    @seed(1)
    @settings(max_examples=1200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(programs())
    def draw(program: Program) -> None:
        nonlocal aliased
        body = program.source[program.source.index("def kernel") :]
        seen.update(word for word in needed if word in body)
        pointers = [a.buffer for a in program.arguments if isinstance(a, Pointer)]
        aliased += len(pointers) > len(set(pointers))

    draw()
    assert seen == set(needed)
    assert aliased > 50
