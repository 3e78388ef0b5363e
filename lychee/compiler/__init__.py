"""From a forward function over ops to what runs: a program, its memory, launches bound once and replayed."""

from .buckets import Buckets
from .lower import Lowered, lower
from .parse import parse
from .passes import optimized
from .program import Program
from .sizes import Size, Sizes
from .trace import Tracer, trace

__all__ = ["Buckets", "Lowered", "Program", "Size", "Sizes", "Tracer", "lower", "optimized", "parse", "trace"]
