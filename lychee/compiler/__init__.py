"""From a forward function over ops to what runs: a program, its memory, launches bound once and replayed."""

from .lower import Lowered, lower
from .program import Program, Sizes
from .trace import trace

__all__ = ["Lowered", "Program", "Sizes", "lower", "trace"]
