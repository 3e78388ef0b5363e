"""`lychee tune`: measure on your own prompts which draft, of what length, pays here, and save it for `lychee run`."""

from .. import waiting  # noqa: F401  # acts when it is imported, before torch
from .cli import main

__all__ = ["main"]
