"""Numbers of things in sentences."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 prompt`, `2 prompts`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
