"""Acceptance emits the target's distribution, by exact enumeration of the shipped code; and what breaks it does."""

import pytest
import torch

from lychee.kernels import accept_coupled, accept_rejection, draw
from lychee.kernels.philox import DRAFT
from lychee.kernels.types import NoiseKeys, SeqKeys, Tree
from tests.kernels.enumeration import VOCAB, Laws, drafted, emission_error, extended, independent
from tests.kernels.laws import chi_square

EXACT = 1e-12
CHAINS = {"chain of 1": [-1, 0], "chain of 2": [-1, 0, 1], "chain of 3": [-1, 0, 1, 2]}
TREES = {
    "2 children": [-1, 0, 0],
    "3 children": [-1, 0, 0, 0],
    "2, then 1 each": [-1, 0, 1, 0, 3],
    "1, then 3": [-1, 0, 1, 1, 1],
    "2, then 3 and 0": [-1, 0, 1, 0, 1, 1],
    "3, then 1 each": [-1, 0, 1, 0, 0, 3, 4],
    "2, then 2 each": [-1, 0, 1, 0, 1, 3, 3],
}


def only(*tokens: int):
    """Nothing outside these tokens."""
    return lambda weights: torch.zeros_like(weights).index_copy(0, torch.tensor(tokens), weights[list(tokens)])


PAIRS = {
    "random": (Laws(7), Laws(8)),
    "peaked": (Laws(7, lambda w: w**6), Laws(8, lambda w: w**6)),
    "zeros": (Laws(7, only(0, 1, 3, 4)), Laws(8, only(0, 2, 3))),
    "draft support of 1": (Laws(7), Laws(8, only(3))),
    "draft support of 2": (Laws(7), Laws(8, only(1, 4))),
    "target support of 1": (Laws(7, only(2)), Laws(8)),
    "equal": (Laws(7), Laws(7)),
    "disjoint": (Laws(7, only(0, 2)), Laws(8, only(1, 3, 4))),
}
TARGET, DRAFT_LAW = PAIRS["random"]
PAIR_TREE = TREES["2, then 1 each"]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("shape", [*CHAINS, *(name for name, parents in TREES.items() if len(parents) < 7)])
def test_rejection_emits_the_targets_distribution(shape, pair):
    assert emission_error((CHAINS | TREES)[shape], *PAIRS[pair]) < EXACT


@pytest.mark.parametrize("shape", [name for name, parents in TREES.items() if len(parents) == 7])
def test_rejection_emits_the_targets_distribution_on_wide_trees(shape):
    assert emission_error(TREES[shape], TARGET, DRAFT_LAW) < EXACT


def test_a_path_cut_by_max_path_is_lossless():
    assert emission_error(CHAINS["chain of 3"], TARGET, DRAFT_LAW, max_path=2) < EXACT


# What breaks it. Each control differs from the passing case above by one thing.
BROKEN = 1e-3


def likeliest(probs, count):
    yield tuple(probs.argsort(descending=True)[:count].tolist()), 1.0


@pytest.mark.parametrize("shape", ["chain of 1", "2, then 1 each"])
def test_control_drafting_greedily_while_dividing_by_the_draft_probabilities(shape):
    assert emission_error((CHAINS | TREES)[shape], TARGET, DRAFT_LAW, drafter=likeliest) > BROKEN


@pytest.mark.parametrize("shape", ["chain of 1", "2, then 1 each"])
def test_control_recovering_from_the_unmodified_target(shape):
    assert emission_error((CHAINS | TREES)[shape], TARGET, DRAFT_LAW, lossless=False) > BROKEN


def test_control_dividing_by_another_nodes_draft_distribution():
    shifted = lambda context: DRAFT_LAW((*context[1:], 0) if context else (0,))  # noqa: E731
    assert emission_error(PAIR_TREE, TARGET, DRAFT_LAW, divisor=shifted) > BROKEN


def test_control_dividing_by_unprocessed_draft_probabilities():
    unprocessed = lambda context: DRAFT_LAW(context).sqrt() / DRAFT_LAW(context).sqrt().sum()  # noqa: E731
    assert emission_error(PAIR_TREE, TARGET, DRAFT_LAW, divisor=unprocessed) > BROKEN


def test_control_ordering_drawn_children_by_probability():
    def reranked(tokens, contexts):
        """Siblings 1 and 2 change places if the later one is likelier."""
        if DRAFT_LAW(())[tokens[2]] > DRAFT_LAW(())[tokens[1]]:
            tokens = [tokens[0], tokens[2], tokens[1]]
            contexts = {0: (), 1: (tokens[1],), 2: (tokens[2],)}
        return tokens, contexts

    assert emission_error(TREES["2 children"], TARGET, DRAFT_LAW) < EXACT
    assert emission_error(TREES["2 children"], TARGET, DRAFT_LAW, edit=reranked) > BROKEN


@pytest.mark.parametrize("shape", ["chain of 2", "2 children"])
def test_control_dropping_a_drawn_child_because_of_its_token(shape):
    def dropped(tokens, contexts):
        """A last node of low draft probability is cut, as a confidence threshold on drafted tokens would."""
        last = len(tokens) - 1
        if DRAFT_LAW(contexts[last][:-1])[tokens[last]] < 0.25:
            tokens = [*tokens[:last], -1]
        return tokens, contexts

    assert emission_error((CHAINS | TREES)[shape], TARGET, DRAFT_LAW, edit=dropped) > BROKEN


def test_control_siblings_that_share_their_accept_noise():
    """As if it were keyed by position alone: the second child meets a uniform known to lie above the first's chance."""

    def one_uniform():
        floor = [0.0]

        def chance_of(child, target_prob, draft_prob, made):
            if not made:
                floor[0] = 0.0
            p = independent(child, target_prob, draft_prob, made)
            given = max(0.0, p - floor[0]) / (1 - floor[0])
            floor[0] = max(floor[0], p)
            return given

        return chance_of

    assert emission_error(TREES["2 children"], TARGET, DRAFT_LAW, chance_of=one_uniform) > BROKEN


def rounds(num_seqs: int, parents: list[int], advance: int) -> torch.Tensor:
    """The first two tokens of many sequences, through the shipped draws; the root's position grows by `advance`."""
    # One distribution for every context, so that a sequence's second round is the first again.
    target_law, draft_law = TARGET(()).float(), DRAFT_LAW(()).float()
    seeds = torch.arange(num_seqs) * 7919 + 12345
    zeros = torch.zeros(num_seqs, dtype=torch.int32)
    emitted = torch.full((num_seqs, 2), -1)
    filled = torch.zeros(num_seqs, dtype=torch.long)
    for round_idx in range(2):
        position = zeros + 100 + advance * filled.int()
        root_tokens = torch.zeros(num_seqs, 1, dtype=torch.int32)
        keys = NoiseKeys(seeds, position, zeros, zeros, zeros.bool())
        children = draw(draft_law.log().expand(num_seqs, -1).contiguous(), keys, len(parents) - 1, DRAFT, False)
        tokens = torch.cat([root_tokens, children], 1)
        nodes = num_seqs * len(parents)
        tree = Tree(
            torch.arange(0, nodes + 1, len(parents), dtype=torch.int32),
            tokens.flatten(),
            torch.tensor(parents, dtype=torch.int32).repeat(num_seqs),
        )
        rows = [law.log().expand(nodes, -1).contiguous() for law in (target_law, draft_law)]
        paths, lens, following = accept_rejection(tree, *rows, SeqKeys(seeds, position, zeros), 2, True)
        accepted = tokens.gather(1, paths[:, 1:].clamp(min=0).long())[:, 0]
        first = torch.where(lens == 2, accepted, following).long()
        emitted.scatter_(1, filled.clamp(max=1)[:, None], torch.where(filled < 2, first, emitted[:, 1])[:, None])
        both = (lens == 2) & (filled == 0)
        emitted[:, 1] = torch.where(both, following.long(), emitted[:, 1])
        filled += lens
        assert round_idx == 0 or bool((filled >= 2).all())
    return emitted


LAW_OF_TWO = TARGET(())[:, None] * TARGET(())[None]


@pytest.mark.parametrize("parents", [[-1, 0], [-1, 0, 0]], ids=["chain", "siblings"])
def test_rounds_with_the_shipped_noise_emit_the_targets_distribution(parents):
    first, second = rounds(8000, parents, advance=1).T
    assert chi_square(first * VOCAB + second, LAW_OF_TWO) > 1e-3


def test_control_noise_of_a_rejected_round_used_again():
    """As if it were keyed by node alone: the next round meets noise of which a rejection has already told something."""
    first, second = rounds(8000, [-1, 0], advance=0).T
    assert chi_square(first * VOCAB + second, LAW_OF_TWO) < 1e-9


def coupled_error(wrong_node: int = 0) -> float:
    """Greedily drafted trees, every combination of the target's own draws at their nodes."""
    parents = PAIR_TREE
    error = []
    for tokens, contexts, _ in drafted(parents, DRAFT_LAW, likeliest):
        num_nodes = len(parents)
        draws = torch.cartesian_prod(*[torch.arange(VOCAB)] * num_nodes)
        laws = torch.stack([TARGET(contexts[node]) for node in range(num_nodes)])
        chances = laws[torch.arange(num_nodes), draws].prod(-1)
        batch = len(draws)
        tree = Tree(
            torch.arange(0, batch * num_nodes + 1, num_nodes, dtype=torch.int32),
            *(torch.tensor(column, dtype=torch.int32).repeat(batch) for column in (tokens, parents)),
        )
        at_nodes = draws.roll(wrong_node, 1).flatten().int()
        paths, lens, following = accept_coupled(tree, at_nodes, 3)
        emitted = torch.zeros([VOCAB] * 3, dtype=torch.float64)
        for path, length, token, chance in zip(paths.tolist(), lens.tolist(), following.tolist(), chances, strict=True):
            context = contexts[path[length - 1]]
            law = torch.zeros(VOCAB, dtype=torch.float64)
            law[token] = chance
            emitted[context] += extended(TARGET, context, law, 3)
        error.append(float((emitted - extended(TARGET, (), TARGET(()), 3)).abs().max()))
    return max(error)


def test_coupled_emits_the_targets_distribution_for_any_drafter():
    assert coupled_error() < EXACT


def test_control_coupled_with_draws_of_another_node():
    assert coupled_error(wrong_node=1) > BROKEN
