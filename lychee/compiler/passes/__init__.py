"""Passes: pure functions from a program to one that computes the same, to the bit, with fewer calls."""

from ..program import Program
from .dead import without_dead_calls
from .fuse import gates_fused

__all__ = ["gates_fused", "optimized", "without_dead_calls"]


def optimized(program: Program) -> Program:
    """What is lowered of a program: the passes in turn."""
    return gates_fused(without_dead_calls(program))
