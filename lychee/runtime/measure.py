"""Measuring what rounds cost here: real rounds of chains and of trees, timed part by part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median

import numpy as np

from .cost_table import CostTable, Curve
from .engine import Engine
from .sequence import Sequence
from .tree import TreeShape
from .warm_up import lowering

ROUNDS = 4  # of each shape at a time; the first is left out
LENGTHS = (0, 1, 3, 4, 7, 8, 12)  # of chains; between them costs are interpolated; rows up to 8 often share a tile
LEAST_SWEEPS, SWEEPS, SECONDS = 2, 6, 0.5  # over all shapes, until so much time has passed; the first lowers programs
DEPTH = 4  # of the trees that are timed

Maker = Callable[[int], Sequence]
"""Makes a request that emits so many tokens."""
Times = tuple[float, float, float]
"""Milliseconds of drafting, of verification and of the rest of a round."""


def measured(engine: Engine, max_depth: int, widths: Iterable[int], make: Maker, room: int) -> CostTable:
    """Costs of rounds, from chains of up to `max_depth` tokens (at least 1) and trees of levels of `widths` rows.

    The engine must be idle. room: tokens that a request may emit, at least MEASURED_FROM; shapes that do not fit are
    left out. What else runs on a machine only adds to a time, so each is the least of several sweeps' medians.
    """
    chains = {length: TreeShape.chain(length) for length in LENGTHS if length <= max_depth}
    trees = {width: TreeShape.widths((width, *(1,) * (DEPTH - 1))) for width in widths if width > 1}
    shapes = [shape for shape in (*chains.values(), *trees.values()) if wanted(shape) <= room]
    least: dict[TreeShape, Times] = {}
    start = time.perf_counter()
    for sweep in range(SWEEPS):
        for shape in shapes:
            found = _timed(engine, shape, make)
            least[shape] = tuple(map(min, found, least.get(shape, found)))  # type: ignore[assignment]
        if sweep + 1 >= LEAST_SWEEPS and time.perf_counter() - start > SECONDS:
            break
    begin, level = line([(length, least[shape][0]) for length, shape in chains.items() if length and shape in least])
    draft = {1: level}
    for width, shape in trees.items():
        if shape in least:
            draft[width] = max(level, (least[shape][0] - begin - level) / (DEPTH - 1))
    verify = {shape.num_nodes: times[1] for shape, times in least.items()}
    other = least[chains[0]][2]
    return CostTable(Curve(tuple(sorted(verify.items()))), Curve(tuple(sorted(draft.items()))), other, begin)


def line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Milliseconds of a chain's drafting: what it begins with, and each level. By least squares; of one, half each."""
    lengths, times = np.array(points).T
    if len(points) == 1:
        return float(times[0]) / 2, float(times[0]) / 2
    level, begin = np.polyfit(lengths, times, 1)
    level = max(1e-3, float(level))
    return max(0.0, float(begin)), level


def wanted(shape: TreeShape) -> int:
    """Tokens that rounds of a shape may emit, so that none is cut."""
    return (ROUNDS + 1) * (shape.depth + 1) + 1


MEASURED_FROM = wanted(TreeShape.chain(1))
"""Tokens of the least requests that costs can be measured with."""


def _timed(engine: Engine, shape: TreeShape, make: Maker) -> Times:
    seq, metrics, found = make(wanted(shape)), engine.metrics, []
    with lowering(engine, shape):
        engine.add(seq)
        engine.step()  # the prompt
        for _ in range(ROUNDS):
            draft, verify, step = metrics.draft_s, metrics.verify_s, metrics.step_s
            engine.step()
            draft, verify = metrics.draft_s - draft, metrics.verify_s - verify
            found.append((draft, verify, metrics.step_s - step - draft - verify))
        engine.abort(seq)
    draft, verify, other = (1e3 * median(part) for part in zip(*found[1:], strict=True))
    return draft, max(verify, 1e-6), max(other, 0.0)
