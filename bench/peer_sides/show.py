"""The tables of `bench.peers`, and its figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from . import REFERENCE
from .compare import Summary

LEGEND = (
    f"tokens/s: of whole calls; times: as fast as {REFERENCE}; after first: tokens/s after the first token; per pass: "
    f"tokens per pass of the target; same: prompts with the tokens of {REFERENCE}; as plain: with those of the side "
    "that it speeds up."
)


def rates(found: Mapping[str, Summary], title: str) -> Table:
    table = Table(title=title, box=None)
    table.add_column("side", no_wrap=True)
    for heading in ("tokens/s", "times", "after first", "first ms", "per pass", "same", "as plain"):
        table.add_column(heading, justify="right", no_wrap=True)
    base = found[REFERENCE].rate if REFERENCE in found else None
    for name, one in found.items():
        times = f"{one.rate / base:.2f}" if base else "-"
        cells = [f"{one.rate:.1f}", times, _number(one.decode_rate), _number(one.first_ms), _number(one.per_pass, 2)]
        table.add_row(name, *cells, _percent(one.identical), _percent(one.as_plain))
    return table


def partings(found: Mapping[str, Summary]) -> Table | None:
    """None where no side parts from the reference."""
    table = Table(title=f"Where tokens part from those of {REFERENCE}: prompt:token (its logit margin)", box=None)
    table.add_column("side", no_wrap=True)
    table.add_column("partings")
    for name, one in found.items():
        if one.partings:
            parts = (f"{p.prompt}:{p.at}" + ("" if p.margin is None else f" ({p.margin:.3g})") for p in one.partings)
            table.add_row(name, ", ".join(parts))
    return table if table.row_count else None


def passes(ms: Mapping[str, Mapping[int, float]], context: int) -> Table:
    sizes = list(next(iter(ms.values())))
    table = Table(title=f"Milliseconds of a pass by number of rows, {context} cached tokens", box=None)
    table.add_column("rows", no_wrap=True)
    for size in sizes:
        table.add_column(str(size), justify="right")
    for name, by_rows in ms.items():
        table.add_row(name, *(f"{by_rows[size]:.1f}" for size in sizes))
    return table


def print_all(
    console: Console,
    title: str,
    found: Mapping[str, Summary],
    ms: Mapping[str, Mapping[int, float]],
    context: int,
    notes: Sequence[str],
) -> None:
    console.print(rates(found, title))
    console.print(LEGEND)
    for table in (partings(found), passes(ms, context) if ms else None):
        if table:
            console.print()
            console.print(table)
    for name, one in found.items():
        if not one.repeats:
            console.print(f"{name} did not emit the same tokens in every round.")
    for note in notes:
        console.print(note)


def figure(path: Path, title: str, found: Mapping[str, Summary], ms: Mapping[str, Mapping[int, float]]) -> None:
    """Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(12, 5), layout="constrained")
    made.suptitle(title)
    left, right = made.subplots(1, 2)
    names = list(found)
    bars = left.barh(names, [found[name].rate for name in names])
    left.bar_label(bars, fmt="%.1f", padding=3)
    left.margins(x=0.12)
    left.invert_yaxis()
    left.set_xlabel("tokens per second, prefill included (median)")
    for name, by_rows in ms.items():
        right.plot(list(by_rows), list(by_rows.values()), marker="o", label=name)
    right.set_xlabel("rows of a forward pass")
    right.set_ylabel("milliseconds (median)")
    right.set_ylim(bottom=0)
    if ms:
        right.set_xticks(list(next(iter(ms.values()))))
        right.legend()
    made.savefig(path, dpi=150)


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
