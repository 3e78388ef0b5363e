"""lychee, natively or speculatively with planned trees, with the threads' waiting that its command line sets."""

from __future__ import annotations

import os
import time

import torch

import lychee
from bench.rows import Pass
from lychee import LLM, SamplingParams
from lychee.models.batch import Batch
from lychee.models.kv_cache import KVCache

from . import Generated, Setup


class LycheeSide:
    """`pass_ms` is of the target; of a speculative side, of its draft."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        self.native = not setup.options["speculative"]
        self.llm = LLM(
            setup.model,
            None if self.native else setup.draft_model,
            None if self.native else {"tree": "auto"},
            device="cpu",
            target_quant=setup.options["target_quant"],
            draft_quant=None if self.native else setup.draft_quant,
            max_num_seqs=1,
            prefix_cache=False,  # prompts come again, and are to be read again as the others do
            max_model_len=setup.context,
        )
        self.llm.warm_up(self._params(4), native=self.native)
        notes = "".join(f"; {note}" for note in self.llm.notes)
        spins = f"GOMP_SPINCOUNT {os.environ['GOMP_SPINCOUNT']}"
        self.about = f"lychee {lychee.__version__}, torch {torch.__version__}, {spins}{notes}"
        self._passes: dict[tuple[int, int], Pass] = {}

    def generate(self, prompt: list[int], max_tokens: int) -> Generated:
        start = time.perf_counter()
        completion = self.llm.generate([prompt], self._params(max_tokens), native=self.native)[0].outputs[0]
        seconds = time.perf_counter() - start
        return Generated(list(completion.token_ids), seconds, completion.stats.ttft_s, completion.stats.rounds + 1)

    def pass_ms(self, rows: int, context: int) -> float:
        model = self.llm.target if self.native else self.llm.draft
        assert model is not None
        if (rows, context) not in self._passes:
            self._passes[rows, context] = Pass(model, rows, context, torch.device("cpu"))
        return self._passes[rows, context].time()

    def logits_of(self, tokens: list[int], candidates: list[int]) -> list[float]:
        target = self.llm.target
        kv = KVCache.allocate(target.config, 1, len(tokens), target.weights.dtype, torch.device("cpu"))
        batch = Batch.prefill([tokens], [0], [[0]], len(tokens), torch.device("cpu"), logit_rows=[len(tokens) - 1])
        found: list[float] = target.forward(batch, kv)[0, candidates].tolist()
        return found

    @staticmethod
    def _params(max_tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
