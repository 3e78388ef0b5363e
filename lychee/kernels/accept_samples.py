"""Sample inputs of the acceptance ops: random trees whose children were drawn from the draft."""

from __future__ import annotations

from typing import Any

import torch

from .philox import DRAFT
from .sample import draw_reference
from .types import NoiseKeys, SeqKeys, Tree


def random_trees(num_seqs: int, max_nodes: int, max_children: int = 3) -> tuple[list[int], list[int]]:
    """Node counts and parents (local, concatenated) of random trees with at most max_children siblings."""
    counts, parents = [], []
    for _ in range(num_seqs):
        room: dict[int, int] = {0: max_children}
        counts.append(int(torch.randint(1, max_nodes + 1, ())))
        parents.append(-1)
        for node in range(1, counts[-1]):
            free = [n for n, children in room.items() if children]
            parent = free[int(torch.randint(0, len(free), ()))]
            parents.append(parent)
            room[parent] -= 1
            room[node] = max_children
    return counts, parents


def accept_coupled_sample(
    dtype: torch.dtype, device: str, *, num_seqs: int, max_nodes: int, max_path: int
) -> dict[str, Any]:
    """Few token ids, so that paths are long; some nodes dead; paths may be cut by max_path."""
    counts, parents = random_trees(num_seqs, max_nodes)
    integers = lambda low, high: torch.randint(low, high, (len(parents),), dtype=torch.int32, device=device)  # noqa: E731
    cu_nodes = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    tree = Tree(cu_nodes, integers(-1, 3), torch.tensor(parents, dtype=torch.int32, device=device))
    return {"tree": tree, "target_tokens": integers(-1, 3), "max_path": max_path}


def drawn_trees_sample(dtype: torch.dtype, device: str, *, num_seqs: int, max_nodes: int, vocab: int) -> dict[str, Any]:
    """Children drawn from the draft, with supports smaller than the children, and a target near the draft or equal.

    Paths may be cut by max_path.
    """
    counts, parents = random_trees(num_seqs, max_nodes)
    num_nodes = len(parents)
    draft = torch.randn(num_nodes, vocab)
    draft[torch.rand(num_nodes, vocab) < 0.3] = float("-inf")
    draft[:, 0].clamp_(min=0.0)
    target = draft + torch.randn(num_nodes, vocab) * (torch.rand(num_nodes, 1) < 0.8)
    target[torch.rand(num_nodes, vocab) < 0.1] = float("-inf")
    target[:, 0].clamp_(min=0.0)
    draft, target = draft.log_softmax(-1), target.log_softmax(-1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_seqs,))
    positions = torch.randint(0, 2**31 - 1, (num_seqs,), dtype=torch.int32)
    samples = torch.randint(0, 8, (num_seqs,), dtype=torch.int32)
    seq = torch.repeat_interleave(torch.arange(num_seqs), torch.tensor(counts))
    cu_nodes = torch.tensor([0, *counts]).cumsum(0).int()
    local = (torch.arange(num_nodes) - cu_nodes[seq]).int()
    greedy = torch.zeros(num_nodes, dtype=torch.bool)
    node_keys = NoiseKeys(seeds[seq], positions[seq], local, samples[seq], greedy)
    drawn = draw_reference(draft, node_keys, 3, DRAFT, False).tolist()
    tokens: list[int] = []
    for node, parent in enumerate(parents):
        root = node - int(local[node])
        if parent < 0:
            tokens.append(0)
        else:
            siblings_before = parents[root:node].count(parent)
            tokens.append(drawn[root + parent][siblings_before] if tokens[root + parent] >= 0 else -1)
    tree = Tree(*(torch.as_tensor(t, dtype=torch.int32, device=device) for t in (cu_nodes, tokens, parents)))
    return {
        "tree": tree,
        "target_log_probs": target.to(device),
        "draft_log_probs": draft.to(device),
        "keys": SeqKeys(*(t.to(device) for t in (seeds, positions, samples))),
        "max_path": max_nodes if torch.rand(()) < 0.7 else int(torch.randint(1, max_nodes + 1, ())),
        "lossless": bool(torch.rand(()) < 0.7),
    }
