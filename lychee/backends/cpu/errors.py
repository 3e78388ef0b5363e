"""What the backend refuses, in a sentence."""

from __future__ import annotations

from .ttir import Op


class UnsupportedError(RuntimeError):
    """The kernel uses what this backend does not compile; the message names the op, the line and a way out."""

    @classmethod
    def of(cls, op: Op, hint: str) -> UnsupportedError:
        return cls(f"{op.line or 'this kernel'}: {op.name} is not supported on the CPU: {hint}")
