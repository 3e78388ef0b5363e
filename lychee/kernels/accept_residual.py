"""What acceptance by rejection and by traversal share: a node's distributions while its children are refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from .accept_coupled import padded_paths
from .philox import ACCEPT, RECOVER, lane, philox_words, uniforms
from .sample import draw_reference
from .types import NoiseKeys, SeqKeys, Tree

Decision = Callable[[int, float], bool]  # of (node, chance): whether it is accepted, with that probability
Walk = Callable[[list[int], list[int], Tensor, Tensor, Decision, int, bool], tuple[list[int], Tensor]]


class Residual:
    """What is left at a node for its next child and for a token of its own.

    `reached` is the probability with which the node's path is accepted, were its subtree tested on: 1 for a node that
    has been accepted already.
    """

    def __init__(self, target_log_probs: Tensor, draft_log_probs: Tensor, reached: float = 1.0) -> None:
        self.target, self.draft_left, self.reached = target_log_probs.exp(), draft_log_probs, reached

    def draft(self) -> Tensor:
        """Normalised by summing what is left; in log space, so that a remainder below fp32's range still counts."""
        return torch.nan_to_num(self.draft_left.softmax(-1), nan=0.0)  # nan: nothing is left

    def chance(self, token: int) -> float:
        """Of a child: min(1, reached * target / draft), and never more than 0 where the target is 0."""
        target, draft = self.reached * float(self.target[token]), float(self.draft()[token])
        return float(target > 0) if target >= draft else target / draft

    def refuse(self, token: int) -> None:
        """Take out what the child's tests have accepted. If that is all, only rounding has refused: no change."""
        residual = (self.reached * self.target - self.draft()).clamp(min=0)
        total = float(residual.sum())
        if total > 0:
            self.target = residual / total
        if self.reached < 1:
            self.reached = total / (total + 1 - self.reached)
        self.draft_left = self.draft_left.index_fill(
            0, torch.tensor(token, device=self.draft_left.device), float("-inf")
        )

    def weights(self, target_log_probs: Tensor, lossless: bool) -> Tensor:
        """By which the next token is drawn."""
        return self.target if lossless else target_log_probs.exp()


def accept_by_philox(seed: int, root_position: int, sample_idx: int) -> Decision:
    def accept(node: int, chance: float) -> bool:
        bits = philox_words(seed, 0, root_position, node, lane(ACCEPT, 0, sample_idx))[0]
        return float(uniforms(torch.tensor(bits))) < chance

    return accept


def accepted(
    walk: Walk,
    tree: Tree,
    target_log_probs: Tensor,
    draft_log_probs: Tensor,
    keys: SeqKeys,
    max_path: int,
    lossless: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk every request's tree and draw the token after its path."""
    bounds, tokens, parents = tree.cu_nodes.tolist(), tree.tokens.tolist(), tree.parents.tolist()
    seq_keys = zip(keys.seeds.tolist(), keys.root_positions.tolist(), keys.sample_idx.tolist(), strict=True)
    paths, weights = [], []
    for (first, end), key in zip(pairwise(bounds), seq_keys, strict=True):
        rows = slice(first, end)
        proposed = tokens[rows], parents[rows], target_log_probs[rows], draft_log_probs[rows]
        path, left = walk(*proposed, accept_by_philox(*key), max_path, lossless)
        paths.append(path)
        weights.append(left)
    last = torch.tensor([path[-1] for path in paths], dtype=torch.int32, device=tree.tokens.device)
    noise = NoiseKeys(keys.seeds, keys.root_positions, last, keys.sample_idx, torch.zeros_like(last, dtype=torch.bool))
    next_tokens = draw_reference(torch.stack(weights).log(), noise, 1, RECOVER, False)[:, 0]
    return *padded_paths(paths, max_path, tree.tokens.device), next_tokens
