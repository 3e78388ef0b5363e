"""The target's text on disk: shards of sequences, each token that the target wrote with the distribution it had."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .rows import Row

KINDS = ("chat", "prose", "code")
Packed = dict[str, np.ndarray]


class Writer:
    """Collects sequences and writes them as numbered files of about ``size`` tokens."""

    def __init__(self, folder: Path, name: str, size: int = 20_000) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.name, self.size = folder, name, size
        mine = sorted(folder.glob(f"{name}-*.npz"))
        self.number, self.begun = len(mine), sum(len(np.load(file)["about"]) for file in mine)
        self.clear()

    def clear(self) -> None:
        """Begin the next shard."""
        self.tokens: list[int] = []
        self.own: list[bool] = []
        self.top: list[tuple[list[int], list[float]]] = []
        self.about: list[tuple[int, int, bool, bool]] = []

    def add(self, row: Row) -> None:
        """Take one sequence."""
        mine, prompt = set(row.own), row.prompt
        self.about.append((len(row.ids), KINDS.index(prompt.kind), prompt.held, prompt.temperature == 0))
        self.tokens += row.ids
        self.own += [i in mine for i in range(len(row.ids))]
        self.top += row.top
        if len(self.tokens) >= self.size:
            self.flush()

    def flush(self) -> None:
        """Write what was collected; a file is there whole or not at all."""
        if not self.about:
            return
        path = self.folder / f"{self.name}-{self.number:05}.npz"
        with open(path.with_suffix(".part"), "wb") as file:
            np.savez(
                file,
                tokens=np.array(self.tokens, np.int32),
                own=np.array(self.own),
                about=np.array(self.about, np.int32),
                top_ids=np.array([ids for ids, _ in self.top], np.int32),
                top_logs=np.array([logs for _, logs in self.top], np.float16),
            )
        os.replace(path.with_suffix(".part"), path)
        self.number += 1
        self.clear()


@dataclass(frozen=True)
class Text:
    """One sequence."""

    ids: np.ndarray
    own: np.ndarray
    top_ids: np.ndarray
    top_logs: np.ndarray
    kind: int
    held: bool
    greedy: bool


def shards(folder: Path) -> list[Path]:
    """The files there are by now."""
    return sorted(folder.glob("*.npz"))


def read(paths: list[Path]) -> list[Text]:
    """All sequences of the shards."""
    texts = []
    for path in paths:
        shard = dict(np.load(path))
        start = first = 0
        for length, kind, held, greedy in shard["about"].tolist():
            own = shard["own"][start : start + length]
            last = first + int(own.sum())
            tops = shard["top_ids"][first:last], shard["top_logs"][first:last]
            texts.append(Text(shard["tokens"][start : start + length], own, *tops, kind, bool(held), bool(greedy)))
            start, first = start + length, last
    return [t for t in texts if len(t.top_ids)]


def choose_outputs(texts: list[Text], vocabulary: int, count: int, always: list[int]) -> np.ndarray:
    """The ``count`` output ids that the target is likeliest to write, with those ``always`` wanted, ascending."""
    mass = np.zeros(vocabulary)
    for text in texts:
        np.add.at(mass, text.top_ids, np.exp(text.top_logs.astype(np.float32)))
        np.add.at(mass, text.ids[text.own], 1)
    mass[always] = np.inf
    return np.sort(np.argsort(-mass, kind="stable")[: max(count, len(always))])


def coverage(texts: list[Text], output_ids: np.ndarray) -> float:
    """The share of what the target wrote that is among the output ids."""
    return float(np.isin(np.concatenate([t.ids[t.own] for t in texts]), output_ids).mean())


def pack(texts: list[Text], output_ids: np.ndarray, vocabulary: int, length: int,
         rng: np.random.Generator) -> list[Packed]:  # fmt: skip
    """The texts as rows of ``length`` tokens, several to a row: the long ones first, each where it fits."""
    place = np.full(vocabulary, -1, np.int64)
    place[output_ids] = np.arange(len(output_ids))
    rows: list[Packed] = []
    used = np.zeros(0, np.int64)
    sizes = np.minimum([len(t.ids) for t in texts], length)
    for n in np.argsort(-sizes - rng.uniform(0, 40, len(texts))).tolist():
        text, size = texts[n], int(sizes[n])
        fits = np.flatnonzero(used + size <= length)
        row = int(fits[0]) if len(fits) else len(rows)
        if row == len(rows):
            rows.append(empty_row(length, text.top_ids.shape[1]))
            used = np.append(used, 0)
        here, before, first = rows[row], np.flatnonzero(text.own[:size]) - 1, int(used[row])
        here["ids"][first : first + size], here["texts"][first : first + size] = text.ids[:size], n
        here["kind"][first : first + size] = text.kind + (0 if text.greedy else len(KINDS))
        here["weight"][first + before] = 1
        here["top"][first + before] = place[text.top_ids[: len(before)]]
        here["logs"][first + before] = text.top_logs[: len(before)]
        used[row] += size
    return rows


def empty_row(length: int, kept: int) -> Packed:
    """A row without texts."""
    return {
        "ids": np.zeros(length, np.int64),
        "texts": np.full(length, -1, np.int64),
        "weight": np.zeros(length, np.float32),
        "top": np.full((length, kept), -1, np.int64),
        "logs": np.zeros((length, kept), np.float32),
        "kind": np.full(length, -1),
    }
