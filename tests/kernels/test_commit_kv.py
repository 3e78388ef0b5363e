"""Committing a path moves its keys and values to their positions, and nothing else."""

import pytest
import torch

from lychee.kernels import commit_kv
from lychee.kernels.kv_store import token_slots
from lychee.kernels.samples import sample_paging
from lychee.kernels.types import Paging
from tests.conftest import DEVICE

FACES = {
    "launch": lambda inputs: commit_kv.run(inputs, commit_kv.contract.check(inputs)),
    "reference": lambda inputs: commit_kv.reference(**inputs),
}
PATHS = {
    "root alone": [[0]],
    "trunk, already in place": [[0, 1, 2, 3]],
    "side branch": [[0, 2, 5]],
    "overlapping sources and destinations": [[0, 2, 3, 4, 5]],
    "ragged": [[0, 2, 5], [0], [0, 1, 3, 4, 9], [0, 7]],
}


def stored(contexts, paths, block_size, num_nodes=10, poison=float("nan")):
    """KV of num_nodes nodes per sequence, numbered element by element; nodes off the path and free slots are poison."""
    paging = sample_paging(contexts, [1] * len(paths), [c + num_nodes for c in contexts], block_size)
    table = torch.full((len(paths), max(len(p) for p in paths) + 1), -1, dtype=torch.int32)
    slots = token_slots(paging.block_tables, block_size)
    kv = torch.full((2, 2, int(slots.max()) + 1, 3, 5), poison)
    for seq, (context, path) in enumerate(zip(contexts, paths, strict=True)):
        table[seq, : len(path)] = torch.tensor(path)
        held = slots[seq, [*range(context), *(context + node for node in path)]].long()
        kv[:, :, held] = torch.randn(2, 2, len(held), 3, 5)
    tensors = {
        "kv": kv,
        "paths": table,
        "context_lens": paging.context_lens,
        "block_tables": paging.block_tables,
    }
    return {**{k: v.to(DEVICE) for k, v in tensors.items()}, "block_size": block_size}, slots


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("paths", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("context", [0, 15, 16, 21])
def test_an_accepted_path_becomes_the_prefix_and_other_slots_stay(face, paths, block_size, context):
    torch.manual_seed(context)
    contexts = [context + seq for seq in range(len(paths))]
    inputs, slots = stored(contexts, paths, block_size)
    before = inputs["kv"].clone()
    FACES[face](inputs)
    want = before.clone()
    for seq, path in enumerate(paths):
        for depth, node in enumerate(path):
            want[:, :, slots[seq, contexts[seq] + depth]] = before[:, :, slots[seq, contexts[seq] + node]]
    torch.testing.assert_close(inputs["kv"], want, rtol=0, atol=0, equal_nan=True)
    for seq, path in enumerate(paths):
        assert torch.isfinite(inputs["kv"][:, :, slots[seq, : contexts[seq] + len(path)].long()]).all()


@pytest.mark.parametrize("face", FACES)
def test_rows_wider_than_a_block_of_the_kernel_are_copied_whole(face):
    torch.manual_seed(0)
    kv = torch.randn(1, 2, 8, 9, 128, device=DEVICE)
    before = kv.clone()
    ints = {"paths": [[0, 2]], "context_lens": [3], "block_tables": [[1, 0]]}
    tensors = {name: torch.tensor(value, dtype=torch.int32, device=DEVICE) for name, value in ints.items()}
    FACES[face]({"kv": kv, **tensors, "block_size": 4})
    # Node 2 is token 5, at slot 1; its depth is 1, so its place is token 4, at slot 0.
    assert torch.equal(kv[:, :, 0], before[:, :, 1])
    assert torch.equal(kv[:, :, 1:], before[:, :, 1:])


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_of_no_slots_is_refused(block_size):
    kv = torch.zeros(1, 2, 8, 1, 4, device=DEVICE)
    ints = lambda *values: torch.tensor(values, dtype=torch.int32, device=DEVICE)  # noqa: E731
    with pytest.raises(ValueError, match="block_size is"):
        commit_kv(kv, ints([0]), ints(1), ints([0]), block_size)
    with pytest.raises(ValueError, match="block_size is"):
        Paging(ints(0, 1), ints(0), ints(1), ints([0]), block_size, 1, 1)
