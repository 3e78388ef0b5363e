"""What a run reports: the table on the terminal and the JSON file, both from the metrics object."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count, islice
from statistics import median
from typing import Any

from rich.table import Table

from .runtime.metrics import Metrics, ratio, tree_name
from .runtime.outputs import CompletionOutput, RequestOutput

LONGEST_NAME = 16  # of a tree in the table


@dataclass
class Run:
    """Outputs and metrics of one way of decoding. `wall_s` is end-to-end time over all its batches."""

    name: str
    wall_s: float = 0.0
    outputs: list[RequestOutput] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)
    interrupted: bool = False
    refused: Mapping[int, str] = field(default_factory=dict)  # prompts by their place among all, and why

    @property
    def places(self) -> list[int]:
        """Of the outputs' prompts, among all prompts."""
        return list(islice((place for place in count() if place not in self.refused), len(self.outputs)))

    @property
    def completions(self) -> list[CompletionOutput]:
        return [completion for output in self.outputs for completion in output.outputs]

    def report(self) -> dict[str, Any]:
        requests: dict[int, dict[str, Any]] = {place: {"error": why} for place, why in self.refused.items()}
        requests |= {
            place: {
                "text": c.text,
                "token_ids": list(c.token_ids),
                "finish_reason": c.finish_reason,
                **c.stats.report(),
            }
            for place, c in zip(self.places, self.completions, strict=True)
        }
        label = {"lossy": True} if self.lossy else {}
        return {"totals": self.metrics.totals(), "requests": [requests[place] for place in sorted(requests)], **label}

    @property
    def lossy(self) -> bool:
        """Some of it was made with fallback_sampling=False, so it is not distributed as the target has it."""
        return any(output.lossy for output in self.outputs)


def report(runs: Seq[Run], identical: bool | None) -> dict[str, Any]:
    """The JSON report: the runs made, and native end-to-end time over speculative where both were."""
    by_name = {run.name: run for run in runs}
    speedup = None
    if len(by_name) == 2:
        speedup = ratio(by_name["native"].wall_s, by_name["speculative"].wall_s)
    return {"runs": {run.name: run.report() for run in runs}, "speedup": speedup, "identical": identical}


def table(runs: Seq[Run]) -> Table:
    """One column per run."""
    made = Table(box=None, pad_edge=False)
    made.add_column()
    for run in runs:
        made.add_column(run.name + (" (lossy)" if run.lossy else ""), justify="right")
    cells = [_cells(run) for run in runs]
    for row in cells[0]:
        made.add_row(row, *(cell[row] for cell in cells))
    return made


def _cells(run: Run) -> dict[str, str]:
    totals = run.metrics.totals()
    stats = [c.stats for c in run.completions]
    first = [s.ttft_s for s in stats if s.ttft_s is not None]
    step_s = run.metrics.step_s

    def number(key: str, form: str = "{:.2f}") -> str:
        return "-" if totals[key] is None else form.format(totals[key])

    def seconds(key: str) -> str:
        return f"{totals[key]:.2f} s ({ratio(totals[key], step_s) or 0:.0%})"

    return {
        "tokens": str(sum(s.emitted for s in stats)),
        "tokens/s": number("tokens_per_second", "{:.1f}"),
        "time to first token, median": f"{1e3 * median(first):.1f} ms" if first else "-",
        "end-to-end time": f"{run.wall_s:.2f} s",
        "mean emitted per round": number("mean_emitted_per_round"),
        "acceptance rate": number("acceptance_rate"),
        "wasted draft share": number("wasted_fraction"),
        "most frequent tree": _most_frequent(run.metrics),
        "draft time": seconds("draft_s"),
        "verify time": seconds("verify_s"),
        "other time": seconds("other_s"),
        "memory": f"{totals['peak_memory_bytes'] / 2**20:.0f} MiB",
    }


def _most_frequent(metrics: Metrics) -> str:
    """The tree that most rounds drafted, and their share."""
    if not metrics.rounds:
        return "-"
    drafted = [(number, tree_name(shape)) for shape, number in metrics.shapes.most_common(1)]
    number, name = max([*drafted, (metrics.rounds_native, "none")])
    return f"{name if len(name) <= LONGEST_NAME else name[:LONGEST_NAME] + '...'} ({number / metrics.rounds:.0%})"
