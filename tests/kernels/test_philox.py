"""Philox: the published answers, the same bits from both faces, and uniforms that never reach 0 or 1."""

import pytest
import torch

from lychee.kernels import philox
from lychee.kernels.philox import exponentials, philox_words, uniforms
from tests.conftest import DEVICE
from tests.kernels.faces import both_faces

# Random123, kat_vectors: philox4x32 of 10 rounds: counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


@both_faces
@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_known_answers(face, counter, key, output):
    low, high = words(key)
    seeds = torch.tensor([signed(high << 32 | low, 64)], device=DEVICE)
    counters = torch.tensor([[signed(word, 32) for word in words(counter)]], dtype=torch.int32, device=DEVICE)
    bits = face(philox, seeds=seeds, counters=counters)
    assert [word & 0xFFFFFFFF for word in bits[0].tolist()] == words(output)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_known_answers_of_python_integers(counter, key, output):
    low, high = words(key)
    assert list(philox_words(signed(high << 32 | low, 64), *words(counter))) == words(output)


def test_uniforms_lie_strictly_between_0_and_1():
    bits = torch.tensor([0, 1, 255, 2**31, 2**32 - 256, 2**32 - 129, 2**32 - 128, 2**32 - 1])
    u = uniforms(bits)
    assert bool((u > 0).all())
    assert bool((u < 1).all())
    assert u[0] == 2.0**-33
    assert u[-1] == 1 - 2.0**-24
    assert bool((u[1:] >= u[:-1]).all())


def test_exponentials_are_accurate_down_to_the_smallest_uniform():
    """The winners of a draw are the smallest exponentials, where log1p(-u) computed as log(1 - u) would be 0."""
    seeds = torch.arange(400) * 7919
    zeros = torch.zeros_like(seeds)
    noise = exponentials(seeds, zeros, zeros, zeros, 1000)
    bits = torch.stack(
        philox_words(seeds[:, None], torch.arange(250), zeros[:, None], zeros[:, None], zeros[:, None]), -1
    )
    u = uniforms(bits.flatten(1))
    assert u.min() < 1e-5
    torch.testing.assert_close(noise, -torch.log1p(-u.double()).float(), rtol=1e-6, atol=0)


def test_a_tokens_noise_depends_on_its_own_counter_only():
    """Neither on the vocabulary's size nor on the rows beside it."""
    seeds, positions = torch.tensor([3, 5, 7]), torch.tensor([2, 2, 9])
    zeros = torch.zeros_like(seeds)
    noise = exponentials(seeds, positions, zeros, zeros, 11)
    alone = exponentials(seeds[1:2], positions[1:2], zeros[:1], zeros[:1], 6)
    assert torch.equal(noise[1:2, :6], alone)
    assert len(noise.unique()) == noise.numel()
