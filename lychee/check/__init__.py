"""`lychee check`: prove on a pair of models that speculation is lossless, and that the proofs would see it if not."""

from .. import waiting  # noqa: F401  # acts when it is imported, before torch
from .cli import main

__all__ = ["main"]
