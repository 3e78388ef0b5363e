"""One model told which tokens to take, one by one: the probabilities that the next would be drawn from."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import process_logits
from ..kernels.types import SamplingRows
from ..models.compiled import CompiledLlama
from ..models.layout import Rows
from ..runtime.blocks import BlockPool
from ..runtime.inputs import SamplingBatch
from ..runtime.sequence import Sequence


@dataclass(frozen=True)
class Reader:
    """A model over the blocks of an engine that runs nothing now. vocab: token ids that may be drawn."""

    model: CompiledLlama
    pool: BlockPool
    vocab: int
    max_num_batched_tokens: int

    def log_probs(self, seq: Sequence, paths: Seq[Seq[int]]) -> Tensor:
        """[num_paths, vocab] fp32, on the host: of the token after `seq`'s prompt and each path.

        The prompt is prefilled; then each token of a path is a pass of one row, as in native decoding.
        seq: of a request without penalties and bad words; it is not started.
        """
        logits = self._logits(seq.prompt, paths)
        num_paths, device = len(paths), self.model.kv.storage.device

        def numbers(values: Seq[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        rows = SamplingRows(
            seq_idx=numbers([0] * num_paths),
            positions=numbers([len(seq.prompt) + len(path) - 1 for path in paths]),
            depths=numbers([0] * num_paths),
            recent_tokens=numbers([-1] * num_paths).view(-1, 1),
        )
        params = SamplingBatch.of((seq,), self.vocab, device).params
        return process_logits(logits, rows, params, self.vocab).cpu()

    def _logits(self, prompt: Seq[int], paths: Seq[Seq[int]]) -> Tensor:
        """Whole blocks of the prompt are shared by all paths, as they are by the completions of one request."""
        pool, size = self.pool, self.model.kv.block_size
        whole = (len(prompt) - 1) // size * size
        shared = pool.allocate(whole // size)
        taken, tables = [*shared], []
        try:
            for path in paths:
                own = pool.allocate(pool.blocks_for(len(prompt) - whole + len(path)))
                taken += own
                tables.append(shared + own)
            for start in range(0, whole, self.max_num_batched_tokens):
                chunk = prompt[start : min(start + self.max_num_batched_tokens, whole)]
                self.model.forward(Rows.prefill([chunk], [start], [shared], size, []))
            return self._after(whole, prompt[whole:], paths, tables)
        finally:
            pool.release(taken)

    def _after(self, num_cached: int, tail: Seq[int], paths: Seq[Seq[int]], tables: Seq[Seq[int]]) -> Tensor:
        """The logits of each path's last token, `num_cached` tokens and the prompt's `tail` being before it."""
        size, num_paths = self.model.kv.block_size, len(paths)
        ends = range(len(tail) - 1, len(tail) * num_paths, len(tail))
        prefill = Rows.prefill([tail] * num_paths, [num_cached] * num_paths, tables, size, ends)
        logits = self.model.forward(prefill).clone()
        for depth in range(max(map(len, paths))):
            going = [i for i, path in enumerate(paths) if len(path) > depth]
            lens, mine = [num_cached + len(tail) + depth] * len(going), [tables[i] for i in going]
            rows = Rows.decode([[paths[i][depth]] for i in going], [[-1]] * len(going), lens, mine, size)
            logits[going] = self.model.forward(rows)
        return logits
