"""Rejection sampling through the engine: emitted tokens have native decoding's distribution, and cheats do not."""

import itertools
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from lychee.runtime.config import SpeculativeConfig
from lychee.runtime.drafter import ModelDrafter
from lychee.runtime.inputs import SamplingBatch
from lychee.runtime.llm import LLM
from lychee.runtime.sampling_params import SamplingParams
from tests.factory import make_model_dir

PROMPT = [1, 40, 41]
TOP_K, TEMPERATURE, LENGTH = 3, 0.8, 4
SAMPLES = 4000
PARAMS = SamplingParams(n=SAMPLES, max_tokens=LENGTH, temperature=TEMPERATURE, top_k=TOP_K, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("distribution")
    target = make_model_dir(root / "target", seed=3)
    return target, make_model_dir(root / "draft", noise_of=target, noise=0.15, seed=4)


def next_probs(llm, prefix):
    """Exact next-token probabilities under temperature and top-k, from native decoding's raw log-probabilities."""
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=llm.vocab, ignore_eos=True)
    (logprobs,) = llm.generate([prefix], params, native=True)[0].outputs[0].logprobs
    best = sorted(logprobs.top.items(), key=lambda item: -item[1])[:TOP_K]
    weights = np.exp(np.array([value for _, value in best]) / TEMPERATURE)
    return dict(zip([token for token, _ in best], weights / weights.sum(), strict=True))


@pytest.fixture(scope="module")
def expected(pair):
    """Probability of every sequence of LENGTH tokens."""
    llm, found = LLM(pair[0]), {(): 1.0}
    for _ in range(LENGTH):
        found = {
            (*path, token): weight * prob
            for path, weight in found.items()
            for token, prob in next_probs(llm, PROMPT + list(path)).items()
        }
    return found


def p_value(llm, expected, params=PARAMS):
    """Of a chi-square test of emitted sequences; rare ones are pooled. A sequence of probability zero fails at once."""
    outputs = llm.generate([PROMPT], params)[0].outputs
    counts = dict.fromkeys(expected, 0)
    for output in outputs:
        if output.token_ids not in counts:
            return 0.0
        counts[output.token_ids] += 1
    pairs = sorted((weight * params.n, counts[path]) for path, weight in expected.items())
    rare = list(itertools.takewhile(lambda pair: pair[0] < 10, pairs))
    pooled = [*pairs[len(rare) :], tuple(map(sum, zip(*rare, strict=True)))] if rare else pairs
    wanted, seen = zip(*pooled, strict=True)
    return chisquare(seen, wanted).pvalue


@pytest.fixture
def llm(pair, fixed_entropy):
    return LLM(*pair, SpeculativeConfig(num_speculative_tokens=2), max_num_seqs=256)


@pytest.fixture
def fixed_entropy():
    """Requests without a seed take one from the system; here a fixed stream of them."""
    with patch("os.urandom", np.random.default_rng(0).bytes):
        yield


def test_rejection_sampling_keeps_the_distribution(llm, expected):
    assert p_value(llm, expected) > 1e-3
    assert 0.2 < llm.metrics().totals()["acceptance_rate"] < 0.95  # both outcomes were exercised


@pytest.mark.parametrize("verify", ["rejection", "traversal"])
@pytest.mark.parametrize("tree", ["2,2", "3,1"])
def test_trees_keep_the_distribution(pair, fixed_entropy, expected, verify, tree):
    llm = LLM(*pair, SpeculativeConfig(tree=tree, verify=verify), max_num_seqs=256)
    assert p_value(llm, expected) > 1e-3
    assert llm.metrics().accepted > llm.metrics().trunk_accepted > 0  # paths off the trunk too


@pytest.mark.parametrize("verify", ["rejection", "traversal"])
def test_ordering_drawn_siblings_by_probability_is_caught(pair, fixed_entropy, expected, verify):
    llm = LLM(*pair, SpeculativeConfig(tree="2,2", verify=verify), max_num_seqs=256)
    drawn = ModelDrafter._draw

    def reranked(self, batch, at, level, log_probs):
        tokens = drawn(self, batch, at, level, log_probs)
        chances = log_probs.numpy()[np.arange(len(tokens))[:, None], np.maximum(tokens, 0)]
        chances[tokens < 0] = -np.inf
        return np.take_along_axis(tokens, np.argsort(-chances, axis=1, kind="stable"), 1)

    llm.engine().drafter.loop.binds = False
    with patch.object(ModelDrafter, "_draw", reranked):
        assert p_value(llm, expected) < 1e-6


def test_native_sampling_keeps_the_distribution(pair, fixed_entropy, expected):
    assert p_value(LLM(pair[0], max_num_seqs=256), expected) > 1e-3


def test_coupled_sampling_keeps_the_distribution(pair, fixed_entropy, expected):
    coupled = LLM(*pair, SpeculativeConfig(num_speculative_tokens=2, verify="coupled"), max_num_seqs=256)
    assert p_value(coupled, expected) > 1e-3


def test_dropping_the_residual_is_caught(pair, fixed_entropy, expected):
    config = SpeculativeConfig(num_speculative_tokens=2, fallback_sampling=False)
    lossy = LLM(*pair, config, max_num_seqs=256)
    with pytest.warns(UserWarning, match="lossy"):
        assert p_value(lossy, expected) < 1e-6
    with pytest.warns(UserWarning, match="lossy"):
        assert lossy.generate([PROMPT], replace(PARAMS, n=1))[0].lossy
    assert not lossy.generate([PROMPT], replace(PARAMS, n=1, seed=1))[0].lossy


def test_drafting_greedily_against_raw_draft_probabilities_is_caught(llm, expected):
    def argmax(self, batch, at, level, log_probs):
        return log_probs.argmax(-1, keepdim=True).int().numpy()

    with patch.object(ModelDrafter, "_draw", argmax):
        assert p_value(llm, expected) < 1e-6


def test_acceptance_noise_used_in_an_earlier_round_is_caught(llm, expected):
    keys = SamplingBatch.seq_keys

    def without_position(self):
        made = keys(self)
        return replace(made, root_positions=torch.zeros_like(made.root_positions))

    with patch.object(SamplingBatch, "seq_keys", without_position):
        assert p_value(llm, expected) < 1e-6
