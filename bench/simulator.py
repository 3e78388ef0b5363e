"""The shipped controllers on synthetic text: how near the oracle they come, how soon they recover, how much they waver.

    python -m bench.simulator [--seed 0] [--json FILE]

No model runs. Costs are like the packaged pair's on a CPU, where every further row costs the target time (`cpu`), and
like those of a device that passes leave idle (`gpu`); a level of the draft takes a tenth of a native round in both.
Text is of one regime, or goes from one to another. Speeds are multiples of native decoding's.
`regret` is what `goodput` takes longer than the oracle, which knows the regime and drafts the best fixed shape for it;
`recovers` is in how many rounds after a change of regime, at worst and of so many changes, the plan is again as good as
NEARLY of the best; `changes` is how often in 100 rounds another shape is drafted, probes of native stretches left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table as Shown

from bench.parser import Parser
from bench.simulated import (
    MAX_DEPTH,
    NODE_BUDGET,
    Knowing,
    Regime,
    Round,
    Text,
    World,
    best_shape,
    fixed,
    milliseconds,
    rate,
)
from lychee.runtime.controller import Controller, Window
from lychee.runtime.cost_table import CostTable, Curve
from lychee.runtime.planned import Planned

CPU = CostTable(
    Curve(((1, 0.9), (2, 0.9), (4, 1.0), (5, 1.15), (9, 1.65), (13, 2.4), (17, 2.95), (33, 5.7))),
    Curve(((1, 0.1), (2, 0.13), (4, 0.16), (8, 0.24))),
    overhead=0.1,
    drafting=0.22,
)
GPU = CostTable(Curve(((1, 10.0), (16, 10.2), (64, 12.0))), Curve(((1, 1.0), (8, 1.0), (64, 1.2))), 0.2, 0.2)
COSTS = {"cpu": CPU, "gpu": GPU}
EASY, MEDIUM, HARD = map(Regime.of, (0.9, 0.7, 0.4))
LENGTHS = range(1, MAX_DEPTH + 1)
THRESHOLD = 0.4  # of the window
NEARLY = 0.9  # of the best shape's tokens per millisecond


def goodput(costs: CostTable) -> Planned:
    """As the option `tree=auto` has it, with measured costs."""
    return Planned(costs, MAX_DEPTH, NODE_BUDGET)


def window() -> Window:
    return Window(MAX_DEPTH, THRESHOLD)


def mixture(stretch: int, stretches: int, seed: int, regimes: Sequence[Regime] = (EASY, MEDIUM, HARD)) -> Text:
    """Stretches of so many tokens on average, at least a third of that, of regimes by turns in random order."""
    draws = np.random.default_rng(seed)
    order: list[int] = []
    while len(order) < stretches:
        some = draws.permutation(len(regimes)).tolist()
        order += some[::-1] if order and order[-1] == some[0] else some
    lengths = stretch // 3 + draws.exponential(stretch - stretch // 3, stretches)
    return Text.of([(regimes[i], int(n) + 1) for i, n in zip(order, lengths, strict=False)], seed)


def recoveries(rounds: Sequence[Round], text: Text, costs: CostTable, nearly: float = NEARLY) -> list[int]:
    """Of each change of regime, the rounds until the plan is nearly the best for the new one. For one request.

    A stretch that ends before that counts for the rounds it had, if they are more than 20.
    """
    found: list[int] = []
    since, before = None, text.regimes[0]
    for one in rounds:
        now = text.regimes[one.at[0]]
        if now != before:
            since, before = 0, now
        if since is not None:
            if rate(one.shapes[0], now, costs) >= nearly * rate(best_shape(now, costs), now, costs):
                found.append(since)
                since = None
            else:
                since += 1
    return found


def changes(rounds: Sequence[Round], skipped: int = 0) -> float:
    """Of plans, in 100 rounds of one request: a round that differs from those around it, which agree, is a probe."""
    plans = [one.shapes[0] for one in rounds[skipped:]]
    steady = [plans[i] for i in range(1, len(plans) - 1) if not plans[i - 1] == plans[i + 1] != plans[i]]
    return 100 * sum(a != b for a, b in pairwise(steady)) / max(1, len(steady))


@dataclass(frozen=True)
class Result:
    """Speeds are multiples of native decoding's."""

    costs: str
    text: str
    oracle: float
    goodput: float
    window: float
    fixed: dict[int, float]
    regret: float
    recovers: list[int]
    changes: float

    @property
    def best_fixed(self) -> int:
        return max(self.fixed, key=lambda length: self.fixed[length])


def measure(name: str, text_name: str, text: Text, costs: CostTable, lengths: Sequence[int] = LENGTHS) -> Result:
    def took(controller: Controller) -> float:
        return milliseconds(World(costs).play(controller, [text]))

    native, oracle = took(fixed(0)), took(Knowing(costs, text))
    rounds = World(costs).play(goodput(costs), [text])
    spent = milliseconds(rounds)
    return Result(
        name,
        text_name,
        native / oracle,
        native / spent,
        native / took(window()),
        {length: native / took(fixed(length)) for length in lengths},
        spent / oracle - 1,
        recoveries(rounds, text, costs),
        changes(rounds),
    )


def texts(seed: int) -> dict[str, Text]:
    found = {f"{r:g}": Text.of([(Regime.of(r), 8000)], seed) for r in (0.1, 0.4, 0.6, 0.7, 0.8, 0.9, 0.97)}
    found |= {f"0.9, 0.7, 0.4 by {n}": mixture(n, 24000 // n, seed) for n in (50, 200, 800)}
    found["0.9, 0.1 by 400"] = mixture(400, 60, seed, [Regime.of(0.9), Regime.of(0.1)])
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.seed < 0:
        parser.error(f"--seed is {args.seed}, must be at least 0")
    headings = "costs", "text", "oracle", "goodput", "window", "fixed 4", "fixed 16", "best fixed"
    shown, results = Shown(*headings, "regret", "recovers", "changes", box=None), []
    for name, costs in COSTS.items():
        for text_name, text in texts(args.seed).items():
            one = measure(name, text_name, text, costs)
            results.append(one)
            best = one.best_fixed
            speeds = one.oracle, one.goodput, one.window, one.fixed[4], one.fixed[16]
            recovers = f"{max(one.recovers)} of {len(one.recovers)}" if one.recovers else ""
            shown.add_row(
                name,
                text_name,
                *(f"{speed:.2f}" for speed in speeds),
                f"{one.fixed[best]:.2f} ({best})",
                f"{one.regret:.1%}",
                recovers,
                f"{one.changes:.1f}",
            )
    Console(width=None if sys.stdout.isatty() else 120).print(shown)
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
