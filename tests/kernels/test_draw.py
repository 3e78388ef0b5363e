"""draw: the law of its samples, independence of its streams, ties, exhausted supports."""

from dataclasses import replace

import pytest
import torch

from lychee.kernels import draw
from lychee.kernels.philox import ACCEPT, DRAFT, RECOVER, TARGET
from lychee.kernels.types import NoiseKeys
from tests.conftest import DEVICE
from tests.kernels.faces import both_faces
from tests.kernels.laws import chi_square

NUM_DRAWS = 50_000
PROBS = torch.tensor([0.4, 0.05, 0.0, 0.25, 0.1, 0.2])
NEVER = float("-inf")


def noise_keys(num_rows: int, greedy: bool = False) -> NoiseKeys:
    zeros = torch.zeros(num_rows, dtype=torch.int32, device=DEVICE)
    seeds = torch.arange(num_rows, device=DEVICE) * 0x9E3779B97F4A7C1 - 2**62
    return NoiseKeys(seeds, zeros + 17, zeros, zeros, torch.full_like(zeros, greedy, dtype=torch.bool))


def draws(probs: torch.Tensor, keys: NoiseKeys, num_samples: int = 1, stream: int = TARGET, replacement: bool = False):
    log_probs = probs.log().expand(len(keys.seeds), -1).contiguous().to(DEVICE)
    return draw(log_probs, keys, num_samples, stream, replacement).cpu().long()


@pytest.mark.parametrize("stream", [TARGET, DRAFT, ACCEPT, RECOVER])
def test_samples_follow_the_softmax(stream):
    samples = draws(PROBS, noise_keys(NUM_DRAWS), stream=stream)[:, 0]
    assert chi_square(samples, PROBS) > 1e-3
    assert chi_square(samples, torch.tensor([0.4, 0.05, 0.0, 0.24, 0.11, 0.2])) < 1e-3  # the test would see 1 % off


def test_ordered_samples_follow_drawing_without_replacement():
    first, second = draws(PROBS, noise_keys(NUM_DRAWS), 2).T
    law = PROBS[:, None] * PROBS[None] / (1 - PROBS[:, None])
    law.fill_diagonal_(0.0)
    assert chi_square((first * 6 + second), law) > 1e-3


def test_samples_with_replacement_are_independent():
    first, second = draws(PROBS, noise_keys(NUM_DRAWS), 2, replacement=True).T
    law = PROBS[:, None] * PROBS[None]
    assert chi_square((first * 6 + second), law) > 1e-3


def test_the_first_sample_is_the_same_with_and_without_replacement():
    keys = noise_keys(200)
    assert torch.equal(draws(PROBS, keys, 3)[:, 0], draws(PROBS, keys, 3, replacement=True)[:, 0])


@pytest.mark.parametrize("field", ["seeds", "positions", "nodes", "sample_idx", "stream"])
def test_draws_under_different_keys_are_independent(field):
    keys = noise_keys(NUM_DRAWS)
    other = keys if field == "stream" else replace(keys, **{field: getattr(keys, field) + 1})
    first = draws(PROBS, keys)[:, 0]
    second = draws(PROBS, other, stream=DRAFT if field == "stream" else TARGET)[:, 0]
    law = PROBS[:, None] * PROBS[None]
    assert chi_square((first * 6 + second), law) > 1e-3


@both_faces
def test_a_row_draws_the_same_alone_and_in_a_batch(face):
    keys, log_probs = noise_keys(5), torch.randn(5, 1500, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    together = face(draw, log_probs=log_probs, keys=keys, num_samples=3, stream=DRAFT, replacement=False)
    third = NoiseKeys(*(t[2:3] for t in vars(keys).values()))
    alone = face(draw, log_probs=log_probs[2:3], keys=third, num_samples=3, stream=DRAFT, replacement=False)
    assert torch.equal(together[2:3], alone)


@both_faces
def test_greedy_rows_take_the_largest_and_the_lowest_id_of_a_tie(face):
    log_probs = torch.full((1, 2100), -3.0, device=DEVICE)
    log_probs[0, [2050, 1500, 1023, 1024, 40]] = torch.tensor([0.0, -1.0, 0.0, 0.0, -1.0], device=DEVICE)
    drawn = face(draw, log_probs=log_probs, keys=noise_keys(1, True), num_samples=7, stream=TARGET, replacement=False)
    assert drawn.tolist() == [[1023, 1024, 2050, 40, 1500, 0, 1]]


@both_faces
def test_greedy_and_noisy_rows_share_a_batch(face):
    log_probs = PROBS.log().expand(64, -1).contiguous().to(DEVICE)
    keys = noise_keys(64)
    mixed = replace(keys, greedy=torch.arange(64, device=DEVICE) % 2 == 0)
    arguments = {"log_probs": log_probs, "num_samples": 1, "stream": TARGET, "replacement": False}
    drawn = face(draw, keys=mixed, **arguments)
    assert drawn[::2].unique().tolist() == [0]
    assert torch.equal(drawn[1::2], face(draw, keys=keys, **arguments)[1::2])
    assert len(drawn[1::2].unique()) > 1


@both_faces
@pytest.mark.parametrize("greedy", [False, True])
def test_an_exhausted_support_draws_minus_1(face, greedy):
    log_probs = torch.full((1, 1030), NEVER, device=DEVICE)
    log_probs[0, [7, 1029]] = torch.tensor([-2e10, -1.0], device=DEVICE)
    drawn = face(draw, log_probs=log_probs, keys=noise_keys(1, greedy), num_samples=4, stream=TARGET, replacement=False)
    assert drawn.tolist() == [[1029, 7, -1, -1]]


@both_faces
@pytest.mark.parametrize("replacement", [False, True])
def test_a_row_with_everything_banned_draws_nothing(face, replacement):
    log_probs = torch.full((2, 9), NEVER, device=DEVICE)
    drawn = face(draw, log_probs=log_probs, keys=noise_keys(2), num_samples=2, stream=TARGET, replacement=replacement)
    assert drawn.unique().tolist() == [-1]
