"""One model told which tokens to take, one by one: the probabilities that the next would be drawn from."""

from __future__ import annotations

from collections.abc import Iterator
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

    def log_probs(self, seq: Sequence, paths: Seq[Seq[int]]) -> Iterator[Tensor]:
        """Each [num_paths, vocab] fp32, on the host: of the token after `seq`'s prompt and the first 0, 1, ..., all
        tokens of each path. The paths are as long as one another.

        The prompt is prefilled; then each token of a path is a pass of one row, as in native decoding.
        seq: of a request without penalties and bad words; it is not started.
        """
        num_paths, device = len(paths), self.model.kv.storage.device

        def numbers(values: Seq[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        params = SamplingBatch.of((seq,), self.vocab, device).params
        zeros, nothing = numbers([0] * num_paths), numbers([-1] * num_paths).view(-1, 1)
        for depth, logits in enumerate(self._logits(seq.prompt, paths)):
            positions = zeros + len(seq.prompt) + depth - 1
            yield process_logits(logits, SamplingRows(zeros, positions, zeros, nothing), params, self.vocab).cpu()

    def room(self, num_prompt: int, length: int) -> int:
        """How many paths of this length fit the pool at once, after one prompt's shared blocks."""
        size = self.model.kv.block_size
        shared = (num_prompt - 1) // size
        return (self.pool.num_free - shared) // (self.pool.blocks_for(num_prompt + length) - shared)

    def _logits(self, prompt: Seq[int], paths: Seq[Seq[int]]) -> Iterator[Tensor]:
        """Whole blocks of the prompt are shared by all paths, as they are by the completions of one request."""
        pool, size = self.pool, self.model.kv.block_size
        num_paths, length = len(paths), len(paths[0])
        whole = (len(prompt) - 1) // size * size
        tail = prompt[whole:]
        shared = pool.allocate(whole // size)
        own = [pool.allocate(pool.blocks_for(len(tail) + length)) for _ in paths]
        tables = [shared + mine for mine in own]
        try:
            for start in range(0, whole, self.max_num_batched_tokens):
                chunk = prompt[start : min(start + self.max_num_batched_tokens, whole)]
                self.model.forward(Rows.prefill([chunk], [start], [shared], size, []))
            ends = range(len(tail) - 1, len(tail) * num_paths, len(tail))
            yield self.model.forward(Rows.prefill([tail] * num_paths, [whole] * num_paths, tables, size, ends))
            for depth in range(length):
                tokens, lens = [[path[depth]] for path in paths], [len(prompt) + depth] * num_paths
                yield self.model.forward(Rows.decode(tokens, [[-1]] * num_paths, lens, tables, size))
        finally:
            pool.release(shared + [block for mine in own for block in mine])
