"""Acceptance emits the target's distribution, by exact enumeration of the shipped code; and what breaks it does."""

import pytest
import torch

from lychee.kernels import accept_coupled, accept_rejection, accept_traversal, draw
from lychee.kernels.accept_rejection import walk as rejection_walk
from lychee.kernels.accept_traversal import walk as traversal_walk
from lychee.kernels.philox import DRAFT
from lychee.kernels.types import NoiseKeys, SeqKeys, Tree
from tests.kernels.enumeration import VOCAB, Laws, drafted, draws_with_replacement, emission, extended
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
    "3 deep, 2 at the root": [-1, 0, 1, 2, 0],
    "3 deep, 2 at the root and below": [-1, 0, 1, 2, 0, 1],
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


OPS = {"rejection": accept_rejection, "traversal": accept_traversal}
WALKS = {"rejection": rejection_walk, "traversal": traversal_walk}
SHAPES = CHAINS | TREES
by_both = pytest.mark.parametrize("rule", WALKS)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("shape", [name for name, parents in SHAPES.items() if len(parents) < 7])
def test_what_is_emitted_is_distributed_as_the_target(shape, pair):
    """By both rules; and traversal accepts no less."""
    rejection, traversal = (emission(walk, SHAPES[shape], *PAIRS[pair]) for walk in WALKS.values())
    assert max(rejection.error, traversal.error) < EXACT
    assert traversal.accepted > rejection.accepted - EXACT


@by_both
@pytest.mark.parametrize("shape", [name for name, parents in TREES.items() if len(parents) == 7])
def test_what_is_emitted_from_wide_trees_is_distributed_as_the_target(shape, rule):
    assert emission(WALKS[rule], TREES[shape], TARGET, DRAFT_LAW).error < EXACT


def test_traversal_accepts_more_on_a_chain():
    rejection, traversal = (emission(walk, CHAINS["chain of 3"], TARGET, DRAFT_LAW) for walk in WALKS.values())
    assert traversal.accepted > 1.1 * rejection.accepted


@by_both
@pytest.mark.parametrize("shape", ["chain of 3", "3 deep, 2 at the root and below"])
def test_a_path_cut_by_max_path_is_lossless(shape, rule):
    cut = emission(WALKS[rule], SHAPES[shape], TARGET, DRAFT_LAW, max_path=2)
    assert cut.error < EXACT
    assert cut.accepted < 1


def stopping(parents, depth, goes_on):
    """Early exit: nodes below `depth` are drafted where `goes_on` of all tokens says so."""
    depths = [0] * len(parents)
    for node, parent in enumerate(parents[1:], 1):
        depths[node] = depths[parent] + 1

    def edit(tokens, contexts):
        if goes_on(tokens):
            return tokens, contexts
        left = [token if at <= depth else -1 for token, at in zip(tokens, depths, strict=True)]
        return left, {node: context for node, context in contexts.items() if depths[node] <= depth}

    return edit


STOPPED = ["2, then 1 each", pytest.param("2, then 2 each", marks=pytest.mark.slow), "3 deep, 2 at the root and below"]


@by_both
@pytest.mark.parametrize("shape", STOPPED)
@pytest.mark.parametrize("pair", ["random", "peaked", "zeros"])
def test_stopping_by_what_was_drawn_above_is_lossless(shape, pair, rule):
    """Whatever is asked of the nodes above, on the trunk or off it."""
    parents = SHAPES[shape]
    second = parents.index(0, 2)
    for goes_on in (lambda tokens: tokens[1] < 2, lambda tokens: tokens[1] < tokens[second]):
        found = emission(WALKS[rule], parents, *PAIRS[pair], edit=stopping(parents, 1, goes_on))
        assert found.error < EXACT


# What breaks it. Each control differs from a passing case above by one thing.
BROKEN = 1e-3


def broken(rule, shape, **how) -> bool:
    return emission(WALKS[rule], SHAPES[shape], TARGET, DRAFT_LAW, **how).error > BROKEN


def likeliest(probs, count):
    yield tuple(probs.argsort(descending=True)[:count].tolist()), 1.0


@by_both
@pytest.mark.parametrize("shape", ["chain of 1", "2, then 1 each"])
def test_control_drafting_greedily_while_dividing_by_the_draft_probabilities(shape, rule):
    assert broken(rule, shape, drafter=likeliest)


@by_both
@pytest.mark.parametrize("shape", ["2 children", "2, then 1 each"])
def test_control_drawing_siblings_with_replacement_while_dividing_as_without(shape, rule):
    assert broken(rule, shape, drafter=draws_with_replacement)


@by_both
@pytest.mark.parametrize("shape", ["chain of 1", "2, then 1 each"])
def test_control_recovering_from_the_unmodified_target(shape, rule):
    assert broken(rule, shape, lossless=False)


@by_both
def test_control_dividing_by_another_nodes_draft_distribution(rule):
    assert broken(rule, "2, then 1 each", divisor=lambda context: DRAFT_LAW((*context[1:], 0) if context else (0,)))


@by_both
def test_control_dividing_by_unprocessed_draft_probabilities(rule):
    unprocessed = lambda context: DRAFT_LAW(context).sqrt() / DRAFT_LAW(context).sqrt().sum()  # noqa: E731
    assert broken(rule, "2, then 1 each", divisor=unprocessed)


@by_both
def test_control_ordering_drawn_children_by_probability(rule):
    def reranked(tokens, contexts):
        """Siblings 1 and 2 change places if the later one is likelier."""
        if DRAFT_LAW(())[tokens[2]] > DRAFT_LAW(())[tokens[1]]:
            tokens = [tokens[0], tokens[2], tokens[1]]
            contexts = {0: (), 1: (tokens[1],), 2: (tokens[2],)}
        return tokens, contexts

    assert broken(rule, "2 children", edit=reranked)


@by_both
@pytest.mark.parametrize("shape", ["chain of 2", "2 children"])
def test_control_dropping_a_drawn_child_because_of_its_token(shape, rule):
    def dropped(tokens, contexts):
        """A last node of low draft probability is cut, as a confidence threshold on drafted tokens would."""
        last = len(tokens) - 1
        if DRAFT_LAW(contexts[last][:-1])[tokens[last]] < 0.25:
            tokens = [*tokens[:last], -1]
        return tokens, contexts

    assert broken(rule, shape, edit=dropped)


@pytest.mark.parametrize(
    ("rule", "shape"), [("rejection", "2 children"), ("traversal", "2 children"), ("traversal", "chain of 2")]
)
def test_control_nodes_that_share_their_accept_noise(rule, shape):
    """As if it were keyed by position alone: the second node meets a uniform known to lie above the first's chance."""

    def one_uniform():
        floor = [0.0]

        def chance_of(node, asked, made):
            if not made:
                floor[0] = 0.0
            given = max(0.0, asked - floor[0]) / (1 - floor[0])
            floor[0] = max(floor[0], asked)
            return given

        return chance_of

    assert broken(rule, shape, chance_of=one_uniform)


def rounds(rule: str, num_seqs: int, parents: list[int], advance: int) -> torch.Tensor:
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
        paths, lens, following = OPS[rule](tree, *rows, SeqKeys(seeds, position, zeros), 2, True)
        accepted = tokens.gather(1, paths[:, 1:].clamp(min=0).long())[:, 0]
        first = torch.where(lens == 2, accepted, following).long()
        emitted.scatter_(1, filled.clamp(max=1)[:, None], torch.where(filled < 2, first, emitted[:, 1])[:, None])
        both = (lens == 2) & (filled == 0)
        emitted[:, 1] = torch.where(both, following.long(), emitted[:, 1])
        filled += lens
        assert round_idx == 0 or bool((filled >= 2).all())
    return emitted


LAW_OF_TWO = TARGET(())[:, None] * TARGET(())[None]


@by_both
@pytest.mark.parametrize("parents", [[-1, 0], [-1, 0, 0]], ids=["chain", "siblings"])
def test_rounds_with_the_shipped_noise_emit_the_targets_distribution(parents, rule):
    first, second = rounds(rule, 8000, parents, advance=1).T
    assert chi_square(first * VOCAB + second, LAW_OF_TWO) > 1e-3


@by_both
def test_control_noise_of_a_rejected_round_used_again(rule):
    """As if it were keyed by node alone: the next round meets noise of which a rejection has already told something."""
    first, second = rounds(rule, 8000, [-1, 0], advance=0).T
    assert chi_square(first * VOCAB + second, LAW_OF_TWO) < 1e-9


def coupled_error(wrong_node: int = 0) -> float:
    """Greedily drafted trees, every combination of the target's own draws at their nodes."""
    parents = TREES["2, then 1 each"]
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


@by_both
@pytest.mark.parametrize("shape", STOPPED)
def test_control_stopping_by_the_tokens_that_it_leaves_out(shape, rule):
    parents = SHAPES[shape]
    below = parents.index(1)
    assert broken(rule, shape, edit=stopping(parents, 1, lambda tokens: tokens[below] < 2))
