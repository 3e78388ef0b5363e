"""Tensors that the sampling ops read, built from sequences and their proposed trees."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lychee.kernels.types import PROMPT_BIT, NoiseKeys, SamplingRows, SamplingTensors, SeqKeys
from lychee.models.batch import on_device
from lychee.models.layout import Ints, Layout, ints

from .sequence import Mode, Sequence


def _padded(rows: Seq[Seq[int]], width: int) -> NDArray[np.int32]:
    """Right-aligned rows, -1 in front."""
    out = np.full((len(rows), width), -1, np.int32)
    for i, row in enumerate(rows):
        if row:
            out[i, width - len(row) :] = row
    return out


@dataclass(frozen=True, eq=False)
class SamplingBatch:
    """Sampling state of the sequences of one step: parameters, seeds and how each is accepted."""

    seqs: tuple[Sequence, ...]
    params: SamplingTensors
    seeds: NDArray[np.int64]
    sample_idx: NDArray[np.int32]
    greedy: NDArray[np.bool_]
    rejection: tuple[bool, ...]
    window: int  # recent tokens that a row must show
    device: torch.device

    @classmethod
    def of(cls, seqs: Seq[Sequence], vocab: int, device: torch.device) -> SamplingBatch:
        def tensor(array: NDArray[np.generic]) -> Tensor:
            return on_device(array, device)

        def floats(name: str) -> Tensor:
            values = np.array([getattr(s.params, name) for s in seqs], np.float64)
            return tensor(np.minimum(values, np.finfo(np.float32).max).astype(np.float32))

        longest = max((len(w) for s in seqs for w in s.bad_words), default=0)
        num_words = max(len(s.bad_words) for s in seqs) if longest else 0
        words = np.full((len(seqs), num_words, longest), -1, np.int32)
        for i, s in enumerate(seqs):
            if s.bad_words:
                words[i, : len(s.bad_words)] = _padded(s.bad_words, longest)
        biases = [sorted((s.params.logit_bias or {}).items()) for s in seqs]
        width = max(len(b) for b in biases)
        bias = np.zeros((len(seqs), width), np.float32)
        for i, pairs in enumerate(biases):
            bias[i, width - len(pairs) :] = [value for _, value in pairs]
        stops = [sorted(s.end_ids) if s.params.min_tokens else [] for s in seqs]
        penalised = any(s.params.penalised for s in seqs)
        params = SamplingTensors(
            temperature=floats("temperature"),
            top_k=tensor(np.array([min(max(s.params.top_k, 0), vocab) for s in seqs], np.int32)),
            top_p=floats("top_p"),
            min_p=floats("min_p"),
            repetition_penalty=floats("repetition_penalty"),
            presence_penalty=floats("presence_penalty"),
            frequency_penalty=floats("frequency_penalty"),
            min_position=tensor(np.array([min(s.num_prompt + s.params.min_tokens, s.limit) for s in seqs], np.int32)),
            stop_ids=tensor(_padded(stops, max(len(s) for s in stops))),
            bias_ids=tensor(_padded([[token for token, _ in pairs] for pairs in biases], width)),
            bias=tensor(bias),
            bad_words=tensor(words),
            token_counts=tensor(np.stack([_counts(s, vocab) for s in seqs])) if penalised else None,
        )
        return cls(
            tuple(seqs),
            params,
            np.array([s.seed for s in seqs], np.int64),
            np.array([s.sample_idx for s in seqs], np.int32),
            np.array([s.mode is Mode.GREEDY for s in seqs]),
            tuple(s.mode is Mode.REJECTION for s in seqs),
            0 if not penalised and not longest else max(longest, 1 + 64 * penalised),
            device,
        )

    @cached_property
    def param_arrays(self) -> tuple[NDArray[Any], ...]:
        """Those of `params`, on the host, in the order in which a program has them as inputs."""
        return tuple(tensor.cpu().numpy() for tensor in vars(self.params).values() if isinstance(tensor, Tensor))

    @cached_property
    def param_widths(self) -> dict[str, int]:
        """Axes of `params` that differ from batch to batch."""
        _, max_words, max_word_len = self.params.bad_words.shape
        widths = {"max_stop": self.params.stop_ids.shape[1], "max_bias": self.params.bias_ids.shape[1]}
        return {**widths, "max_words": max_words, "max_word_len": max_word_len}

    def rows(self, indices: Ints, layout: Layout, tokens: Seq[Seq[int]]) -> SamplingRows:
        """A row per node of `layout`, of the sequence that `indices` gives; `tokens` are those of its trees' nodes."""
        assert layout.ancestors is not None
        roots = self._roots[indices]
        if self.window:
            paths = zip(layout.seq_idx.tolist(), layout.ancestors.tolist(), layout.depths.tolist(), strict=True)
            tails = [[tokens[seq][node] for node in path[1 : depth + 1]] for seq, path, depth in paths]
            recent = [(self.seqs[i].tokens + t)[-self.window :] for i, t in zip(indices.tolist(), tails, strict=True)]
        else:
            recent = [[-1]] * len(indices)
        return SamplingRows(
            seq_idx=self._ints(indices),
            positions=self._ints(roots + layout.depths),
            depths=self._ints(layout.depths),
            recent_tokens=on_device(_padded(recent, max(self.window, 1)), self.device),
        )

    @property
    def _roots(self) -> Ints:
        return ints([len(s.tokens) - 1 for s in self.seqs])

    def keys(self, indices: Ints, positions: Ints, nodes: Ints) -> NoiseKeys:
        """Noise of one draw per entry of `indices`, the sequence index of each row."""
        noise = RowNoise.of(self, indices)
        return NoiseKeys(
            seeds=on_device(noise.seeds, self.device),
            positions=self._ints(positions),
            nodes=self._ints(nodes),
            sample_idx=self._ints(noise.sample_idx),
            greedy=on_device(noise.greedy, self.device),
        )

    def seq_keys(self) -> SeqKeys:
        """Noise of acceptance, one entry per sequence."""
        return SeqKeys(
            seeds=on_device(self.seeds, self.device),
            root_positions=self._ints(self._roots),
            sample_idx=self._ints(self.sample_idx),
        )

    def _ints(self, values: Ints) -> Tensor:
        return on_device(values, self.device)


@dataclass(frozen=True)
class RowNoise:
    """What of each row's noise is its sequence's own; `indices` [num_rows] are sequences of the batch."""

    indices: Ints
    sample_idx: Ints
    seeds: NDArray[np.int64]
    greedy: NDArray[np.bool_]

    @staticmethod
    def of(batch: SamplingBatch, indices: Ints) -> RowNoise:
        return RowNoise(indices, batch.sample_idx[indices], batch.seeds[indices], batch.greedy[indices])


def _counts(seq: Sequence, vocab: int) -> NDArray[np.int32]:
    """Times each token was emitted; bit 30 marks tokens of the prompt."""
    counts = np.bincount(np.asarray(seq.emitted, np.int64), minlength=vocab).astype(np.int32)
    counts[np.asarray(seq.prompt, np.int64)] |= 1 << PROMPT_BIT
    return counts
