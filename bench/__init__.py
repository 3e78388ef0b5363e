"""Benches, run from the repository's root as `python -m bench.NAME`; what holds for all of them is set here, first."""

from lychee import interrupts, waiting  # noqa: F401  # waiting acts when it is imported, before torch

interrupts.say_where_uncaught("bench")
