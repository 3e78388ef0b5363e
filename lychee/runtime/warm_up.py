"""Running every kind of batch once, so that kernels are compiled and loaded before the first request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

from lychee.models.batch import Batch
from lychee.models.kv_cache import KVCache
from lychee.models.llama import Llama

from .controller import Fixed
from .drafter import ModelDrafter
from .engine import Engine
from .goes_on import Always
from .tree import TreeShape

# Rows and cached tokens: the kernels of most rounds. With a window also the first context that it does not hold.
TREES = (*((rows, 0) for rows in range(1, 9)), (8, 64), (1, 512), (5, 512), (9, 512), (17, 512), (1, 1024))
CHUNKS = ((8, 0), (40, 0))
DRAFT_TREES = ((1, 0), (2, 0), (1, 512), (2, 512), (1, 1024))
WINDOWED_TREES, WINDOWED_CHUNK = (1, 9), 40


def warm_up(engine: Engine) -> None:
    """Forward passes of both models on the engine's own blocks. It must be idle; its prefix cache is emptied."""
    engine.scheduler.pool.forget()
    passes = [(engine.target.model, engine.kv, TREES)]
    if isinstance(engine.drafter, ModelDrafter):
        passes.append((engine.drafter.model, engine.drafter.kv, DRAFT_TREES))
    room = engine.scheduler.pool.num_blocks * engine.kv.block_size
    for model, kv, trees in passes:
        longest = min(room, model.config.max_positions)
        windows = sorted(set(model.config.windows) - {0})
        for rows, context in (*trees, *product(WINDOWED_TREES, windows)):
            if rows + context <= longest:
                _forward(model, kv, rows, context, is_tree=True)
        for rows, context in (*CHUNKS, *product((WINDOWED_CHUNK,), windows)):
            if rows + context <= longest:
                _forward(model, kv, rows, context, is_tree=False)


@contextmanager
def lowering(engine: Engine, shape: TreeShape) -> Iterator[None]:
    """Within, every round is of this shape, and what comes is lowered the first time."""
    drafter, controller = engine.drafter, engine.controller
    every = [engine.target.buckets, engine.verifier.buckets]
    if isinstance(drafter, ModelDrafter):
        every += [drafter.compiled.buckets, drafter.loop.buckets]
    before = [buckets.after for buckets in every]
    for buckets in every:
        buckets.after = 0
    engine.controller = Fixed(shape, None if controller.goes_on is None else Always(controller.goes_on.levels))
    try:
        yield
    finally:
        engine.controller = controller
        for buckets, after in zip(every, before, strict=True):
            buckets.after = after


def _forward(model: Llama, kv: KVCache, rows: int, context: int, is_tree: bool) -> None:
    blocks = [range(-(-(rows + context) // kv.block_size))]
    tokens, lens, device = [[0] * rows], [context], kv.storage.device
    if is_tree:
        batch = Batch.decode(tokens, [range(-1, rows - 1)], lens, blocks, kv.block_size, device)
    else:
        batch = Batch.prefill(tokens, lens, blocks, kv.block_size, device)
    model.forward(batch, kv)
