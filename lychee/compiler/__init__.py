"""From a forward function over ops to what runs: a program, its memory, launches bound once and replayed."""

from .buckets import Buckets
from .lower import Lowered, lower
from .program import Program, Size, Sizes
from .trace import Tracer, trace

__all__ = ["Buckets", "Lowered", "Program", "Size", "Sizes", "Tracer", "lower", "trace"]
