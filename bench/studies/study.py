"""What a study gives: rows for a table, and lines for a figure."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from lychee import LLM

Run = Callable[[LLM, argparse.Namespace], "Study"]


@dataclass(frozen=True)
class Lines:
    """One figure. `lines` maps a name to its points, x to y; `level` is a y to compare with."""

    x: str
    y: str
    lines: Mapping[str, Mapping[Any, float]]
    level: float | None = None
    logarithmic: bool = False  # x, by powers of 2


@dataclass(frozen=True)
class Study:
    """`rows` are values by column; a column's name says its unit."""

    title: str
    rows: Sequence[Mapping[str, Any]]
    figure: Lines
    notes: Sequence[str] = ()

    def table(self) -> Table:
        shown = Table(title=self.title, box=None)
        for column in self.rows[0]:
            shown.add_column(column, justify="left" if isinstance(self.rows[0][column], str) else "right")
        for row in self.rows:
            shown.add_row(*map(_text, row.values()))
        return shown

    def write(self, directory: Path, name: str, command: str) -> list[Path]:
        """`name`.json and `name`.png. Raises OSError, or ImportError without matplotlib."""
        numbers, picture = directory / f"{name}.json", directory / f"{name}.png"
        numbers.write_text(json.dumps({"command": command, **asdict(self)}, indent=1, default=str) + "\n")
        _draw(self.figure, self.title, picture)
        return [numbers, picture]


def _text(value: Any) -> str:
    if isinstance(value, tuple):  # a median and its interval, which one run does not have
        return f"{value[0]:.3f}" if value[1] == value[2] else "{:.3f}  [{:.3f}, {:.3f}]".format(*value)
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return "-" if value is None else str(value)


def _draw(figure: Lines, title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    made = Figure(figsize=(9, 5), layout="constrained")
    axes = made.subplots()
    places = list(dict.fromkeys(x for line in figure.lines.values() for x in line))
    if any(isinstance(x, str) for x in places):  # kinds: bars side by side
        width = 0.8 / len(figure.lines)
        for number, (name, line) in enumerate(figure.lines.items()):
            at = [places.index(x) + (number - (len(figure.lines) - 1) / 2) * width for x in line]
            axes.bar_label(axes.bar(at, list(line.values()), width, label=name), fmt="%.2f", fontsize=7)
        axes.set_xticks(range(len(places)), places)
    else:
        for name, line in figure.lines.items():
            axes.plot(list(line), list(line.values()), marker="o", label=name)
        if figure.logarithmic:
            axes.set_xscale("log", base=2)
        axes.set_xticks(places, [f"{x:g}" for x in places])
    if figure.level is not None:
        axes.axhline(figure.level, color="grey", linestyle="--", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set(title=title, xlabel=figure.x, ylabel=figure.y)
    axes.legend()
    made.savefig(path, dpi=150)
