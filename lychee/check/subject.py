"""The pair under test: its engines, run to where a proof wants them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from ..runtime.config import Verify
from ..runtime.drafter import ModelDrafter
from ..runtime.engine import Engine
from ..runtime.llm import LLM
from ..runtime.requests import Prompt
from ..runtime.sampling_params import SamplingParams
from ..runtime.sequence import Sequence
from .exact import Reader

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Subject:
    """An LLM with a draft model, under the configuration that it has. Nothing else uses it meanwhile."""

    llm: LLM

    @property
    def engine(self) -> Engine:
        return self.llm.engine()

    @property
    def native(self) -> Engine:
        return self.llm.engine(native=True)

    @property
    def drafter(self) -> ModelDrafter:
        assert isinstance(self.engine.drafter, ModelDrafter)
        return self.engine.drafter

    @property
    def target(self) -> Reader:
        engine = self.native
        return Reader(engine.target, engine.scheduler.pool, engine.vocab, engine.scheduler.max_num_batched_tokens)

    @property
    def draft(self) -> Reader:
        engine = self.engine
        limit = engine.scheduler.max_num_batched_tokens
        return Reader(self.drafter.compiled, engine.scheduler.pool, engine.vocab, limit)

    @property
    def rejection(self) -> Verify:
        """How this configuration accepts for requests without a seed; rejection, where it has them coupled too."""
        verify = self.llm.speculative_config.verify
        return "rejection" if verify in ("auto", "coupled") else verify

    def sequences(self, prompt: Prompt, params: SamplingParams, verify: Verify, first_id: int = 0) -> list[Sequence]:
        """Of a request whose proposals are accepted as `verify` says."""
        return replace(self.llm.maker, verify=verify).sequences(prompt, params, first_id)

    def complete(
        self, prompts: Seq[Prompt], params: SamplingParams, *, native: bool = False, together: bool = False
    ) -> list[Tokens]:
        """The tokens of each prompt, greedy or coupled; the prompts are one batch, or one is run after the other."""
        engine = self.native if native else self.engine
        seqs = [self.sequences(prompt, params, "coupled", number)[0] for number, prompt in enumerate(prompts)]
        for batch in [seqs] if together else [[seq] for seq in seqs]:
            for seq in batch:
                engine.add(seq)
            while not engine.idle:
                engine.step()
        return [tuple(seq.emitted) for seq in seqs]
