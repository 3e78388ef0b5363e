"""The configurations in which ops are launched on a GPU, and what their compiled kernels may take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from lychee.kernels import OPS
from lychee.kernels.aot import DTYPES, Usage

ROWS = (16, 32, 64)  # of one, two and four row tiles
WIDTHS = (1024, 4096, 12288)  # out_features of each class of tiles
PRODUCTS = ("linear", "linear_int8", "linear_int4")
# Of 16-bit products of at most 16 rows: a thread's instructions for each weight. At full bandwidth an H200 has time for
# 15.6 (bf16), 7.8 (int8) and 4.1 (int4).
PER_WEIGHT = {"linear": 15.6, "linear_int8": 7.8, "linear_int4": 4.1}
LOAD_BITS = {"linear": 128, "linear_int8": 128, "linear_int4": 64}


@dataclass(frozen=True)
class Unmet:
    """A budget that an op is known not to meet where `axis` is set (None: ever), and how far off it may be."""

    op: str
    axis: str | None
    per_weight: float = 0.0
    stack: int = 0


UNMET = (
    Unmet("linear_int4", None, per_weight=16.0),  # unpacks to fp32 and scales there
    Unmet("linear_int8", "grouped", per_weight=10.5),  # scales every weight, not the sums
    Unmet("attention", "int8_cache", stack=96),  # loads a byte at a time
)


@dataclass(frozen=True)
class Configuration:
    """An op at its typical sizes but for these. `usual`: one of those that a default test compiles."""

    op: str
    dtype: str
    sizes: tuple[tuple[str, int], ...] = ()
    usual: bool = False


def shipped() -> Iterator[Configuration]:
    """Every op in every dtype at its typical sizes, then what chooses other tiles, layouts or kernels."""
    for op, dtype in product(OPS, DTYPES):
        yield Configuration(op, dtype, usual=dtype == "bfloat16")
    for op, rows, width in product(PRODUCTS, ROWS, WIDTHS):
        usual = (rows, width) in ((16, 12288), (64, 1024))
        yield Configuration(op, "bfloat16", (("num_tokens", rows), ("out_features", width)), usual)
    for rows, width in product(ROWS, WIDTHS[:1]):
        yield Configuration("linear", "float32", (("num_tokens", rows), ("out_features", width), ("has_bias", 1)))
    for op in ("linear_int8", "linear_int8_prefill", "lm_head_int8", "embed_int8"):
        yield Configuration(op, "bfloat16", (("grouped", 1),), usual=op == "linear_int8")
    for group, minimums in product((0, 1, 2), (0, 1)):
        sizes = (("group_kind", group), ("has_minimums", minimums))
        yield Configuration("linear_int4", "bfloat16", sizes, usual=(group, minimums) == (0, 1))
    for head_dim, group in ((128, 1), (64, 8)):
        sizes = (("head_dim", head_dim), ("group", group))
        yield from (Configuration(op, "bfloat16", sizes) for op in ("attention", "attention_prefill"))
    for op, dtype in product(("attention", "attention_prefill"), ("float32", "bfloat16")):
        yield Configuration(op, dtype, (("window", 1000),), usual=(op, dtype) == ("attention", "bfloat16"))
    for op in ("attention", "attention_prefill", "rope_store"):
        yield Configuration(op, "bfloat16", (("int8_cache", 1),), usual=op == "attention")


def broken_budgets(configuration: Configuration, usage: Usage) -> list[str]:
    """What a kernel takes more of than it may, a sentence each. Decode products have budgets of their own.

    The sentence of what is known, and no worse than that, begins with `known: `.
    """
    given = dict(configuration.sizes)
    known = [u for u in UNMET if u.op == usage.op and (u.axis is None or given.get(u.axis))]
    over = []
    if usage.spilled or usage.local_accesses:
        mark = "known: " if any(usage.spilled <= u.stack for u in known) else ""
        over.append(f"{mark}{usage.kernel} spills: {usage.spilled} bytes of stack, {usage.local_accesses} accesses")
    if usage.op not in PRODUCTS or usage.dtype == "float32":
        return over
    if usage.mma == "-":
        over.append(f"{usage.kernel} multiplies without a tensor core")
    if LOAD_BITS[usage.op] not in usage.load_bits:
        over.append(f"{usage.kernel} has no load of {LOAD_BITS[usage.op]} bits, but of {usage.load_bits}")
    most = PER_WEIGHT[usage.op]
    if given.get("num_tokens", 16) <= 16 and (usage.per_weight is None or usage.per_weight > most):
        mark = "known: " if any((usage.per_weight or 1e9) <= u.per_weight for u in known) else ""
        over.append(f"{mark}{usage.kernel} takes {usage.per_weight} instructions a weight, at most {most}")
    return over
