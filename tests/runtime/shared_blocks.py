"""A watch over an engine's blocks: what others may share is never written."""

from contextlib import contextmanager
from unittest import mock

import torch

from lychee.models.layout import Rows
from lychee.runtime import draft_loop, drafter, engine
from lychee.runtime.drafter import ModelDrafter


@contextmanager
def watched(llm):
    """Within, every slot that a pass writes is checked, and after each step the KV of all blocks that are published."""
    mine, pool = llm.engine(), llm.engine().scheduler.pool
    size, step = pool.block_size, mine.step
    model = mine.drafter if isinstance(mine.drafter, ModelDrafter) else None
    seen = {}

    def is_private(slot):
        block = slot // size
        return pool._refs[block] == 1 and block not in pool._keys

    def by_target(slots):
        assert all(map(is_private, slots)), "the target writes in a block that is shared"

    def by_draft(slots):
        assert len(set(slots)) == len(slots), "a slot is written twice in one pass"
        for slot in slots:
            added = slot % size >= pool.drafted[slot // size]
            assert added or is_private(slot), "the draft writes what others count on"

    def compare():
        published = {block: key for key, block in pool._named.items()}
        assert published == pool._keys
        for block, key in published.items():
            slots = slice(block * size, (block + 1) * size)
            kv = mine.kv.storage[:, :, slots].clone()
            drafted = model.kv.storage[:, :, slots][:, :, : pool.drafted[block]].clone() if model else kv[:, :, :0]
            known, before = seen.get((block, key), (kv, drafted))
            assert torch.equal(kv, known), "the target's KV of a published block has changed"
            both = min(drafted.shape[2], before.shape[2])  # it may have been evicted, and published again
            assert torch.equal(drafted[:, :, :both], before[:, :, :both]), "the draft's KV of one has changed"
            seen[block, key] = kv, drafted

    def stepped():
        chunks = step()
        compare()
        return chunks

    mine.step = stepped
    with (
        mock.patch.object(engine, "Rows", recording(by_target)),
        mock.patch.object(drafter, "Rows", recording(by_draft)),
        mock.patch.object(draft_loop, "Rows", recording(by_draft)),
    ):
        try:
            yield
        finally:
            mine.step = step


def recording(record):
    class Recorded(Rows):
        @staticmethod
        def of(*args):
            rows = Rows.of(*args)
            record(rows.slots.tolist())
            return rows

    return Recorded
