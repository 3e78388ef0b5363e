"""QuantFormat: how weights are quantised, by a short name, and which tensors of a model are."""

from __future__ import annotations

import re
from dataclasses import dataclass

INT4 = re.compile(r"int4(?:-g(32|64|128)(?:-(sym|zero|min))?)?")
PROJECTION = re.compile(r"model\.layers\.\d+\..+_proj\.weight")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ALLOWED = "int8, int8-g32, int4, or int4-g32, int4-g64 or int4-g128, each alone or with -sym, -zero or -min"


@dataclass(frozen=True)
class QuantFormat:
    """`group`: elements of a row that share a scale, 0 for all of them. `kind`, with w = scale * q + minimum:

    "sym": no minimums, zero is a value of q. "zero": minimum = -scale * zero, zero a whole number from 0 to 15.
    "min": any minimum.
    """

    bits: int
    group: int
    kind: str

    @classmethod
    def parse(cls, name: str) -> QuantFormat:
        """Raises ValueError naming what is allowed. `int4` is `int4-g32-min`, and `-min` may be left out."""
        if name in ("int8", "int8-g32"):
            return cls(8, 32 if name == "int8-g32" else 0, "sym")
        match = INT4.fullmatch(name)
        if match is None:
            raise ValueError(f"quantisation format is {name[:80]!r}, must be {ALLOWED}")
        return cls(4, int(match[1] or 32), match[2] or "min")

    @property
    def name(self) -> str:
        """What `parse` takes, in full."""
        if self.bits == 8:
            return "int8-g32" if self.group else "int8"
        return f"int4-g{self.group}-{self.kind}"

    def fits(self, in_features: int) -> bool:
        return in_features > 0 and (self.group == 0 or in_features % self.group == 0)

    def refusal(self, name: str, in_features: int) -> str:
        """Why a tensor does not fit, and what does."""
        others = [QuantFormat(4, group, self.kind if self.bits == 4 else "min") for group in (128, 64, 32)]
        fitting = [f.name for f in (*others, QuantFormat(8, 32, "sym")) if f.fits(in_features)]
        return (
            f"{name} has {in_features} in_features, {self.name} needs a multiple of {self.group}; "
            f"{', '.join([*fitting, 'int8'])} would fit"
        )


INT8 = QuantFormat(8, 0, "sym")


def format_of(name: str, fmt: QuantFormat, tied: bool) -> QuantFormat | None:
    """The format of a tensor of a model quantised to `fmt`; None for those that stay floats.

    The projections of the layers have the format asked for. The head is int8 per row whatever that is, and so is the
    embedding that is `tied` to it: int4 there costs quality. Another embedding, norms and biases stay as they are.
    """
    if PROJECTION.fullmatch(name):
        return fmt
    return INT8 if name == HEAD or (tied and name == EMBEDDING) else None
