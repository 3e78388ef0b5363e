"""Coupled acceptance: descend while a child holds the token the target itself drew. Greedy is the noise-free case."""

from __future__ import annotations

import functools
from itertools import pairwise

import torch
import triton.language as tl
from torch import Tensor

from .accept_samples import accept_coupled_sample
from .kernel import kernel
from .op import op
from .sizes import next_power_of_2
from .types import Cost, NextTokens, NodeTokens, PathLens, Paths, Tree


def accept_coupled_reference(
    tree: Tree, target_tokens: NodeTokens, max_path: int
) -> tuple[Paths, PathLens, NextTokens]:
    bounds, tokens, parents = tree.cu_nodes.tolist(), tree.tokens.tolist(), tree.parents.tolist()
    drawn = target_tokens.tolist()
    paths, next_tokens = [], []
    for first, end in pairwise(bounds):
        path = [0]
        for child in range(1, end - first):
            follows = parents[first + child] == path[-1] and tokens[first + child] == drawn[first + path[-1]] >= 0
            if follows and len(path) < max_path:
                path.append(child)
        paths.append(path)
        next_tokens.append(drawn[first + path[-1]])
    device = tree.tokens.device
    return *padded_paths(paths, max_path, device), torch.tensor(next_tokens, dtype=torch.int32, device=device)


def padded_paths(paths: list[list[int]], max_path: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Paths [num_seqs, max_path], -1 past the end, and their lengths."""
    padded = [path + [-1] * (max_path - len(path)) for path in paths]
    lengths = [len(path) for path in paths]
    on_device = functools.partial(torch.tensor, dtype=torch.int32, device=device)
    return on_device(padded), on_device(lengths)


def accept_coupled_cost(tree: Tree, target_tokens: Tensor, max_path: int) -> Cost:
    return Cost(flops=0, bytes=4 * (3 * target_tokens.numel() + (max_path + 3) * (tree.cu_nodes.numel() - 1)))


@kernel
def _accept_coupled_kernel(
    paths_ptr,  # [num_seqs, max_path]
    path_lens_ptr,  # [num_seqs]
    next_tokens_ptr,  # [num_seqs]
    cu_nodes_ptr,  # [num_seqs + 1]
    tokens_ptr,  # [num_nodes]
    parents_ptr,  # [num_nodes]
    target_tokens_ptr,  # [num_nodes]
    max_path,
    BLOCK_P: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    first = tl.load(cu_nodes_ptr + seq).to(tl.int64)
    num_nodes = (tl.load(cu_nodes_ptr + seq + 1) - first).to(tl.int32)
    offs_p = tl.arange(0, BLOCK_P)
    path = tl.where(offs_p == 0, 0, -1)
    node = 0
    length = 1
    drawn = tl.load(target_tokens_ptr + first)
    for child in range(1, num_nodes):
        token = tl.load(tokens_ptr + first + child)
        parent = tl.load(parents_ptr + first + child)
        if (parent == node) & (token == drawn) & (token >= 0) & (length < max_path):
            path = tl.where(offs_p == length, child, path)
            node = child
            length += 1
            drawn = tl.load(target_tokens_ptr + first + child)
    tl.store(paths_ptr + seq * max_path + offs_p, path, mask=offs_p < max_path)
    tl.store(path_lens_ptr + seq, length)
    tl.store(next_tokens_ptr + seq, drawn)


@op(
    reference=accept_coupled_reference,
    sample=accept_coupled_sample,
    cost=accept_coupled_cost,
    typical={"num_seqs": 16, "max_nodes": 32, "max_path": 9},
)
def accept_coupled(
    paths: Tensor, path_lens: Tensor, next_tokens: Tensor, tree: Tree, target_tokens: Tensor, max_path: int
) -> None:
    """Descend to the child that holds `target_tokens[node]`; where none does, that token is the next one.

    A path of max_path nodes goes no deeper. One program per request, one scan: parents precede their children.
    """
    num_seqs = path_lens.shape[0]
    _accept_coupled_kernel[(num_seqs,)](
        paths,
        path_lens,
        next_tokens,
        tree.cu_nodes,
        tree.tokens,
        tree.parents,
        target_tokens,
        max_path,
        BLOCK_P=max(32, next_power_of_2(max_path)),
    )
