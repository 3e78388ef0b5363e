"""From models and options to engines: their controller, their memory, their parts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from lychee.models.kv_cache import KVCache
from lychee.models.llama import Llama

from .acceptance import Rule
from .blocks import BlockPool
from .checks import refuse
from .config import EngineConfig, SpeculativeConfig
from .controller import Controller, make_controller
from .cost_table import CostTable
from .drafter import ModelDrafter
from .engine import Engine
from .memory_plan import MemoryPlan, free_memory, plan
from .planned import Planned
from .scheduler import Scheduler
from .tree import TreeShape


@dataclass(frozen=True)
class EngineMaker:
    """draft None, or `native` where it is asked for, makes engines that decode natively."""

    target: Llama
    draft: Llama | None
    vocab: int
    config: SpeculativeConfig
    sizes: EngineConfig
    max_model_len: int
    int8_cache: bool
    device: torch.device

    def make(self, native: bool) -> Engine:
        """Raises ParameterError where its KV pool does not fit."""
        draft, sizes, controller = self._draft(native), self.sizes, self._controller(native)
        num_blocks = self._plan(native, controller).checked().num_blocks
        kv, pool = self._allocate(self.target, num_blocks), BlockPool(num_blocks, sizes.block_size, sizes.prefix_cache)
        drafter = None
        if draft is not None:
            draft_kv = self._allocate(draft, num_blocks)
            drafter = ModelDrafter(draft, draft_kv, pool, self.vocab, sizes.max_num_batched_tokens)
        scheduler = Scheduler(pool, sizes.max_num_seqs, sizes.max_num_batched_tokens, sizes.prefill_budget)
        rule = Rule(self.config.verify != "rejection", self.config.fallback_sampling)
        return Engine(self.target, kv, scheduler, drafter, controller, vocab=self.vocab, rule=rule)

    def memory_plan(self, native: bool) -> MemoryPlan:
        """What an engine that is made now will own. Raises ParameterError where no pool fits."""
        return self._plan(native, self._controller(native))

    def memory(self, engine: Engine) -> int:
        """On CUDA the allocator's peak, else the bytes of the weights and of the KV blocks that were in use at once."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        models, block_size = self._models(engine.drafter is None), self.sizes.block_size
        block = sum(KVCache.block_bytes(model.config, block_size, self._kv_dtype(model)) for model in models)
        return sum(model.weights.num_bytes for model in models) + engine.scheduler.pool.max_used * block

    def _draft(self, native: bool) -> Llama | None:
        return None if native else self.draft

    def _models(self, native: bool) -> Seq[Llama]:
        draft = self._draft(native)
        return [self.target] if draft is None else [self.target, draft]

    def _controller(self, native: bool) -> Controller:
        config, draft = self.config, self._draft(native)
        if draft is None or config.shape != "auto":
            return make_controller(config)
        share = draft.weights.num_bytes / self.target.weights.num_bytes
        return Planned(CostTable.guessed(share), config.max_draft_len, config.budget)

    def _plan(self, native: bool, controller: Controller) -> MemoryPlan:
        models = self._models(native)
        shapes = controller.shapes if len(models) > 1 else [TreeShape.chain(0)]
        kv_dtypes = [self._kv_dtype(model) for model in models]
        return plan(models, kv_dtypes, self.sizes, self.max_model_len, shapes, free_memory(self.device))

    def _allocate(self, model: Llama, num_blocks: int) -> KVCache:
        """Raises ParameterError where there is not so much memory."""
        dtype, block_size = self._kv_dtype(model), self.sizes.block_size
        try:
            return KVCache.allocate(model.config, num_blocks, block_size, dtype, self.device)
        except RuntimeError as error:
            wanted = num_blocks * KVCache.block_bytes(model.config, block_size, dtype) / 2**30
            raise refuse("num_blocks", num_blocks, f"fewer: {wanted:,.1f} GiB cannot be allocated") from error

    def _kv_dtype(self, model: Llama) -> torch.dtype:
        return torch.int8 if self.int8_cache else model.weights.dtype
