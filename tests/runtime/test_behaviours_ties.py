"""Near ties and exact ones: native and speculative decoding see the same bits, and the lowest id wins."""

import functools

import pytest
import torch
from safetensors.torch import load_file, save_file

from lychee import demo
from lychee.kernels import draw, process_logits
from lychee.kernels.philox import TARGET
from lychee.kernels.types import NoiseKeys
from lychee.runtime.llm import LLM
from tests.conftest import DEVICE
from tests.factory import make_model_dir
from tests.kernels.faces import both_faces
from tests.runtime.pairs import PROMPTS, drafting, following, greedy, make_llm, root, seeded

DTYPES = pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
PAIRS = [prompt for kind in demo.prompts().values() for prompt in kind][::6]


def greedy_keys(rows):
    zeros = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    return NoiseKeys(zeros.long(), zeros, zeros, zeros, torch.ones(rows, dtype=torch.bool, device=DEVICE))


@both_faces
@pytest.mark.parametrize("vocab", [2, 5, 64, 1024, 1025, 2049, 4097])
def test_the_lowest_id_wins_an_exact_tie(face, vocab):
    """Within a block of the vocabulary, across blocks, between 0.0 and -0.0, and where only -inf is beside it."""
    torch.manual_seed(vocab)
    rows = 40
    log_probs = torch.full((rows, vocab), -7.0, device=DEVICE)
    log_probs[::4] = float("-inf")
    ties = [sorted({int(i) for i in torch.randint(0, vocab, (3,))} | {vocab - 1}) for _ in range(rows)]
    for row, ids in enumerate(ties):
        log_probs[row, ids] = [0.0, -1.5, -0.0][row % 3]
        if row % 3 == 0:
            log_probs[row, ids[0]] = -0.0
    inputs = {
        "log_probs": log_probs,
        "keys": greedy_keys(rows),
        "num_samples": 1,
        "stream": TARGET,
        "replacement": False,
    }
    assert face(draw, **inputs)[:, 0].tolist() == [ids[0] for ids in ties]


@both_faces
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_logits_that_a_coarse_dtype_makes_equal_stay_equal(face, dtype):
    """Hundreds of ids share the largest bf16 logit; neither the pipeline nor the draw tells them apart."""
    torch.manual_seed(0)
    inputs = process_logits.sample(
        torch.float32, DEVICE, num_rows=9, num_seqs=3, vocab=5000, padding=7, has_counts=False
    )
    sampling = inputs["sampling"]
    for neutral in ("temperature", "min_position", "top_k", "min_p"):
        getattr(sampling, neutral).zero_()
    sampling.bias_ids.fill_(-1)
    sampling.bad_words.fill_(-1)
    logits = (40 + torch.rand(9, 5007, device=DEVICE) / 8).to(dtype).float()
    largest = logits[:, :5000].amax(1, keepdim=True)
    assert bool(((logits[:, :5000] == largest).sum(1) > 100).all())
    log_probs = face(process_logits, **{**inputs, "logits": logits})
    drawn = face(draw, log_probs=log_probs, keys=greedy_keys(9), num_samples=1, stream=TARGET, replacement=False)
    assert torch.equal(drawn[:, 0], (logits == largest).int().argmax(1).int())


@functools.cache
def twins():
    """A model in whose eyes tokens 2i and 2i + 1 are equally likely, always."""
    path = make_model_dir(root() / "twins", tie=False)
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"][1::2] = weights["lm_head.weight"][0::2]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def said(outputs):
    """Tokens and their log-probabilities, to the bit."""
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def accepted(outputs):
    return sum(o.outputs[0].stats.accepted for o in outputs)


@DTYPES
def test_of_two_tokens_that_are_always_tied_the_lower_is_emitted(dtype):
    params = greedy(logprobs=2)
    llm = make_llm("far", target=twins(), dtype=dtype)
    native = llm.generate(PROMPTS, params, native=True)
    assert all(token % 2 == 0 for tokens, _ in said(native) for token in tokens)
    first, second = native[0].outputs[0].logprobs[0].top.values()
    assert first == second
    assert said(llm.generate(PROMPTS, params)) == said(native)


@DTYPES
@pytest.mark.parametrize("twin", [0, 1], ids=["lower", "higher"])
def test_a_drafter_that_proposes_the_twin_of_every_token_changes_nothing(dtype, twin):
    params = greedy(logprobs=2)
    llm = make_llm(target=twins(), dtype=dtype)
    native = llm.generate(PROMPTS, params)
    known = following(native)
    with drafting(llm, lambda seq, length: [token + twin for token in known(seq, length)]):
        outputs = llm.generate(PROMPTS, params)
    assert said(outputs) == said(native)
    assert (accepted(outputs) > 0) == (twin == 0)


@functools.cache
def packaged(dtype):
    return LLM(demo.TARGET, demo.DRAFT, {"num_speculative_tokens": 5}, dtype=dtype, device=DEVICE)


@DTYPES
@pytest.mark.parametrize(
    "params", [greedy(max_tokens=40, logprobs=3), seeded(max_tokens=40, logprobs=3)], ids=["greedy", "seed"]
)
def test_speculation_gives_the_tokens_and_the_bits_of_their_probabilities(dtype, params):
    llm = packaged(dtype)
    native = llm.generate(PAIRS, params, native=True)
    speculative = llm.generate(PAIRS, params)
    assert accepted(speculative) > 0
    assert said(speculative) == said(native)
