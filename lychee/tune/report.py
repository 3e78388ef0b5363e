"""What `lychee tune` prints, and what its file keeps of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from ..nouns import counted
from ..runtime.alternate import NATIVE
from .found import Draft, Gain, Scenario, policy_name
from .verdict import Verdict

SIGNS = {True: "+", False: "-", None: " "}


def show(scenario: Scenario, drafts: Seq[Draft], verdict: Verdict) -> None:
    """The ladder of each draft, the drafts beside each other, and the verdict."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False)
    many = counted(scenario.num_prompts, "prompt")
    console.print(
        f"{many}, {scenario.together} at a time on {scenario.device}, measured natively first", soft_wrap=True
    )
    for draft in drafts:
        if draft.unfit is None:
            console.print(ladder(scenario, draft))
    console.print(compared(scenario, drafts))
    console.print(reasons(verdict))
    print(summary(drafts, verdict))


def ladder(scenario: Scenario, draft: Draft) -> Table:
    """A row for native decoding and each rung; ~ marks what was too slow to be tried on all prompts."""
    made = _table(
        f"{draft.name}, {counted(draft.prompts, 'prompt')}",
        "end to end",
        "times native",
        "emitted per round",
        "wasted",
        "memory",
    )
    made.add_row(NATIVE, f"{draft.native:.2f} s", "1.00", "1.00", "-", _mib(scenario.memory))
    for rung in draft.rungs:
        made.add_row(
            policy_name(rung.policy),
            f"{'~' * rung.few}{rung.seconds:.2f} s",
            _gain(rung.gain),
            _number(rung.emitted),
            _number(rung.wasted),
            _mib(rung.memory),
        )
    return made


def compared(scenario: Scenario, drafts: Seq[Draft]) -> Table:
    """A row for each draft."""
    made = _table("draft", "parameters / target's", "time / target's", "agreement", "best rung", "times native")
    for draft in drafts:
        best = draft.best
        made.add_row(
            draft.name,
            f"{draft.parameters / scenario.parameters:.3f}",
            _number(draft.cost),
            _number(draft.agreement),
            "-" if best is None else policy_name(best.policy),
            "-" if best is None else _gain(draft.confirmed or best.gain),
        )
    return made


def reasons(verdict: Verdict) -> Table:
    """Those for (+) and against (-) drafting."""
    made = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        made.add_column()
    for reason in verdict.reasons:
        made.add_row(SIGNS[reason.favours], reason.topic, reason.text)
    return made


def summary(drafts: Seq[Draft], verdict: Verdict) -> str:
    if verdict.adopted is None or verdict.policy is None:
        return "verdict: do not adopt a draft here, decode natively"
    times = f"{verdict.gain.times:.2f} times as fast" if verdict.gain else ""
    return f"verdict: adopt {drafts[verdict.adopted].name} here, {policy_name(verdict.policy)}: {times}"


def as_json(scenario: Scenario, drafts: Seq[Draft], verdict: Verdict) -> dict[str, Any]:
    """All numbers."""
    told = {**asdict(scenario), "mode": scenario.mode.name.lower()}
    return {"scenario": told, "drafts": [asdict(draft) for draft in drafts], "verdict": asdict(verdict)}


def _table(*headings: str) -> Table:
    made = Table(box=None, pad_edge=False)
    for at, heading in enumerate(headings):
        made.add_column(heading, justify="right" if at else "left")
    return made


def _gain(gain: Gain) -> str:
    return f"{gain.times:.2f} [{gain.low:.2f}, {gain.high:.2f}]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
