"""Proposals: the trees of a round, as a drafter proposes them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from torch import Tensor

from lychee.models.layout import Ints, ints

from .nodes import Nodes
from .sequence import Sequence
from .tree import ProposedTree, TreeShape


@dataclass(frozen=True, eq=False)
class Proposals:
    """One proposed tree per sequence.

    draft_log_probs: [num_live_nodes, vocab] fp32, in the order of `nodes`; a row is what its node's children were drawn
    from. None where no sequence is accepted by rejection, which alone reads it.
    """

    trees: tuple[ProposedTree, ...]
    draft_log_probs: Tensor | None = None

    @cached_property
    def tokens(self) -> Ints:
        """Of all nodes, dead ones too."""
        return ints([*chain.from_iterable(tree.tokens for tree in self.trees)])

    @cached_property
    def nodes(self) -> Nodes:
        """Those that live."""
        return Nodes.of(tuple(tree.shape for tree in self.trees)).alive(self.tokens)

    @property
    def all_live(self) -> bool:
        return len(self.nodes.rows) == len(self.tokens)


def undrafted(seqs: Seq[Sequence]) -> Proposals:
    """One node each: plain decoding."""
    return Proposals(tuple(ProposedTree(TreeShape.chain(0), (seq.tokens[-1],)) for seq in seqs))


def refuse_undrawn(tokens: Iterable[int], model: str) -> None:
    """A draw is -1 where no token has a probability. Raises ArithmeticError."""
    if min(tokens, default=0) < 0:
        raise ArithmeticError(
            f"the {model} model's logits are not finite: its weights hold NaN or infinity, or overflow in this dtype"
        )
