"""The acceptance ops: which path is taken, on trees small enough to follow by hand; and that both faces take it."""

import pytest
import torch

from lychee.kernels import accept_coupled, accept_rejection, accept_traversal
from lychee.kernels.accept_samples import drawn_trees_sample
from lychee.kernels.types import SeqKeys, Tree
from tests.conftest import DEVICE
from tests.kernels.faces import both_faces, launch, reference
from tests.kernels.laws import chi_square

NEVER = float("-inf")


def ints(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def tree_of(*requests: tuple[list[int], list[int]]) -> Tree:
    """A batch of (tokens, parents)."""
    sizes = torch.tensor([0] + [len(tokens) for tokens, _ in requests])
    tokens, parents = ([x for r in requests for x in r[i]] for i in (0, 1))
    return Tree(ints(sizes.cumsum(0).tolist()), ints(tokens), ints(parents))


def seq_keys(num_seqs: int, position: int = 3) -> SeqKeys:
    zeros = torch.zeros(num_seqs, dtype=torch.int32, device=DEVICE)
    return SeqKeys(torch.arange(num_seqs, device=DEVICE) * 104729 + 1, zeros + position, zeros)


def log_probs(rows) -> torch.Tensor:
    return torch.tensor(rows, device=DEVICE).log()


def follow(face, tree: Tree, target_tokens: list[int], max_path: int = 4):
    paths, lens, tokens = face(accept_coupled, tree=tree, target_tokens=ints(target_tokens), max_path=max_path)
    assert (paths >= 0).sum(-1).tolist() == lens.tolist()
    return [[n for n in path if n >= 0] for path in paths.tolist()], tokens.tolist()


# Node:    0  1  2  3  4   node 1 and 2 below the root, 3 below 1, 4 below 2
PARENTS = [-1, 0, 0, 1, 2]


@both_faces
def test_coupled_descends_to_the_child_that_holds_the_targets_draw(face):
    tree = tree_of(([9, 5, 6, 7, 8], PARENTS))
    assert follow(face, tree, [6, 0, 8, 0, 4]) == ([[0, 2, 4]], [4])
    assert follow(face, tree, [5, 8, 0, 0, 0]) == ([[0, 1]], [8])
    assert follow(face, tree, [7, 7, 7, 7, 7]) == ([[0]], [7])


@both_faces
def test_coupled_never_enters_a_dead_node(face):
    assert follow(face, tree_of(([9, -1, 6, -1, 8], PARENTS)), [-1, 0, 8, 0, 4]) == ([[0]], [-1])


@both_faces
def test_coupled_paths_stop_at_max_path(face):
    tree = tree_of(([9, 5, 6, 7, 8], PARENTS))
    assert follow(face, tree, [6, 0, 8, 0, 4], max_path=2) == ([[0, 2]], [8])


@both_faces
def test_coupled_takes_the_first_of_two_children_with_the_same_token(face):
    assert follow(face, tree_of(([9, 5, 5, 7, 8], PARENTS)), [5, 7, 8, 1, 2]) == ([[0, 1, 3]], [1])


@both_faces
def test_coupled_requests_of_a_ragged_batch_are_independent(face):
    requests = ([9], [-1]), ([9, 5, 6, 7, 8], PARENTS), ([1, 2], [-1, 0])
    assert follow(face, tree_of(*requests), [3, 6, 0, 8, 0, 4, 2, 7]) == ([[0], [0, 2, 4], [0, 1]], [3, 4, 7])


by_both = pytest.mark.parametrize("op", [accept_rejection, accept_traversal], ids=["rejection", "traversal"])


def run(face, op, tree, target, draft, lossless=True, max_path=4, keys=None):
    arguments = {"tree": tree, "target_log_probs": target, "draft_log_probs": draft, "max_path": max_path}
    keys = keys or seq_keys(len(tree.cu_nodes) - 1)
    paths, lens, tokens = face(op, keys=keys, lossless=lossless, **arguments)
    assert (paths >= 0).sum(-1).tolist() == lens.tolist()
    return paths, tokens


def repeated(num_seqs: int, tokens: list[int], parents: list[int], target, draft):
    """The same tree and distributions for many seeds."""
    return tree_of(*[(tokens, parents)] * num_seqs), target.repeat(num_seqs, 1), draft.repeat(num_seqs, 1)


@by_both
@both_faces
def test_a_token_of_probability_zero_is_never_accepted_or_emitted(face, op):
    target = log_probs([[0.0, 0.7, 0.3, 0.0]] * 3)
    draft = log_probs([[0.5, 0.0, 0.1, 0.4]] * 3)
    paths, tokens = run(face, op, *repeated(24, [9, 0, 3], [-1, 0, 0], target, draft))
    assert paths[:, 1].unique().tolist() == [-1]
    assert set(tokens.tolist()) <= {1, 2}


@by_both
@both_faces
@pytest.mark.parametrize("rare", [-30.0, -200.0])
def test_nor_is_it_where_only_rounding_tells_draft_and_target_apart(face, op, rare):
    """What the draft gives to token 1 is less than rounding, so no residual is left when it is refused."""
    target = log_probs([[1.0, 0.0]] * 3)
    draft = torch.tensor([[0.0, rare]] * 3, device=DEVICE)
    paths, tokens = run(face, op, *repeated(8, [9, 1, 0], [-1, 0, 1], target, draft))
    assert paths[:, 1].unique().tolist() == [-1]
    assert tokens.unique().tolist() == [0]


@by_both
@both_faces
def test_everything_is_accepted_where_draft_and_target_agree(face, op):
    torch.manual_seed(0)
    both = torch.randn(3, 50, device=DEVICE).log_softmax(-1)
    both[0] = (both[0] * 30).log_softmax(-1)
    rare = int((both[0] + 80).abs().argmin())
    assert -85 < both[0, rare] < -75
    paths, _ = run(face, op, *repeated(24, [9, rare, 40], [-1, 0, 1], both, both))
    assert paths.unique(dim=0).tolist() == [[0, 1, 2, -1]]


@by_both
@both_faces
def test_dead_nodes_are_skipped_and_no_draft_row_of_a_leaf_is_read(face, op):
    target = log_probs([[0.4, 0.6, 0.0]] * 5)
    draft = log_probs([[0.0, 1.0, 0.0]] * 5)
    draft[[1, 3, 4]] = float("nan")
    paths, tokens = run(face, op, *repeated(24, [9, 1, -1, -1, -1], [-1, 0, 0, 1, 2], target, draft))
    taken, refused = tokens[paths[:, 1] == 1], tokens[paths[:, 1] == -1]
    assert 0.3 < len(taken) / 24 < 0.9
    assert set(taken.tolist()) == {0, 1}
    assert set(refused.tolist()) == {0}


@by_both
@both_faces
def test_paths_stop_at_max_path(face, op):
    both = log_probs([[0.2, 0.8]] * 3)
    paths, _ = run(face, op, *repeated(8, [9, 1, 0], [-1, 0, 1], both, both), max_path=2)
    assert paths.unique(dim=0).tolist() == [[0, 1]]


@both_faces
def test_traversal_accepts_an_unlikely_token_for_the_sake_of_what_follows_it(face):
    """Half a chance at the first token and 2 at the second: rejection stops at the first half of the time."""
    target = log_probs([[0.4, 0.6, 0.0], [0.8, 0.2, 0.0], [1.0, 0.0, 0.0]])
    draft = log_probs([[0.8, 0.2, 0.0], [0.4, 0.6, 0.0], [1.0, 0.0, 0.0]])
    request = repeated(400, [9, 0, 0], [-1, 0, 1], target, draft)
    whole = [
        float((run(face, op, *request)[0][:, 2] == 2).float().mean()) for op in (accept_rejection, accept_traversal)
    ]
    assert 0.4 < whole[0] < 0.6
    assert whole[1] > 0.99


@by_both
@both_faces
def test_acceptance_of_a_request_does_not_depend_on_its_batch(face, op):
    torch.manual_seed(1)
    inputs = drawn_trees_sample(torch.float32, DEVICE, num_seqs=3, max_nodes=7, vocab=20)
    whole = face(op, **inputs)
    first, end = inputs["tree"].cu_nodes[1:3].tolist()
    alone = {
        "tree": Tree(ints([0, end - first]), inputs["tree"].tokens[first:end], inputs["tree"].parents[first:end]),
        "target_log_probs": inputs["target_log_probs"][first:end],
        "draft_log_probs": inputs["draft_log_probs"][first:end],
        "keys": SeqKeys(*(t[1:2] for t in vars(inputs["keys"]).values())),
    }
    for part, expected in zip(face(op, **inputs | alone), whole, strict=True):
        assert torch.equal(part, expected[1:2])


@by_both
@both_faces
def test_lossy_recovery_draws_from_the_unmodified_target(face, op):
    """The child of probability 0.5 that was just refused comes back, which lossless recovery never does."""
    target, draft = log_probs([[0.5, 0.5, 0.0]] * 2), log_probs([[1.0, 0.0, 0.0]] * 2)
    request = repeated(24, [9, 0], [-1, 0], target, draft)
    for lossless, expected in ((True, {1}), (False, {0, 1})):
        paths, tokens = run(face, op, *request, lossless=lossless)
        assert set(tokens[paths[:, 1] == -1].tolist()) == expected


@by_both
@both_faces
@pytest.mark.parametrize("sample_idx", [0, 1])
def test_second_children_far_below_fp32s_range_are_still_tested_fairly(face, op, sample_idx):
    """At a low temperature what is left after the first child weighs e^-500: a sum of probabilities would be 0."""
    target = log_probs([[0.0, 0.3, 0.7]]).repeat(3, 1)
    draft = torch.tensor([[0.0, -500.0, -500.0]] * 3, device=DEVICE)
    keys = seq_keys(3000)
    keys = SeqKeys(keys.seeds, keys.root_positions, keys.sample_idx + sample_idx)
    emitted = []
    for second in (1, 2):  # equally likely to be drawn after token 0
        request = repeated(3000, [9, 0, second], [-1, 0, 0], target, draft)
        paths, tokens = run(face, op, *request, keys=keys)
        emitted.append(torch.where(paths[:, 1] == 2, second, tokens))
    assert chi_square(torch.stack(emitted).T.flatten(), torch.tensor([0.0, 0.3, 0.7])) > 1e-3


@by_both
@pytest.mark.parametrize(("vocab", "max_path"), [(5, 9), (5, 3), (4096, 9)])
def test_both_faces_take_the_same_decisions(op, vocab, max_path):
    """But for chances within rounding of the noise, and scores within rounding of each other."""
    torch.manual_seed(2)
    inputs = drawn_trees_sample(torch.float32, DEVICE, num_seqs=300, max_nodes=9, vocab=vocab)
    inputs |= {"max_path": max_path, "lossless": True}
    got, expected = (torch.column_stack(face(op, **inputs)) for face in (launch, reference))
    assert expected[:, -2].unique().numel() >= 3
    assert int((got != expected).any(-1).sum()) <= 1
