"""Every part of the sampling pipeline, on trees and without a seed, leaves the joint law of the tokens exact.

The law is computed from the model's raw logits in float64, by code that shares nothing with the pipeline: by path,
because penalties look at it. Logit biases leave five tokens, so that all sequences can be counted.
"""

import math
from collections import Counter
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
from scipy.stats import chisquare

from lychee.models.layout import Rows
from lychee.runtime.config import SpeculativeConfig
from lychee.runtime.inputs import SamplingBatch
from lychee.runtime.llm import LLM
from lychee.runtime.sampling_params import SamplingParams
from tests.factory import make_model_dir

PROMPT, KEPT, LENGTH = [1, 40, 41], (40, 43, 50, 61, 77), 4
MANY, FEW, AT_ONCE = 200_000, 1024, 512
PARTS = {
    "temperature": {"temperature": 1.3},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "presence_penalty": {"presence_penalty": 0.9},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "all": {"temperature": 1.2, "top_k": 4, "top_p": 0.95, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("laws")
    target = make_model_dir(root / "target", seed=3)
    return target, make_model_dir(root / "draft", noise_of=target, noise=0.15, seed=4)


@pytest.fixture(autouse=True)
def fixed_entropy():
    """Requests without a seed take one from the system; here a fixed stream of them."""
    with patch("os.urandom", np.random.default_rng(0).bytes):
        yield


@pytest.fixture(scope="module")
def logits(pair):
    """Raw logits of KEPT after every path of fewer than LENGTH of them."""
    llm = LLM(pair[0], max_num_seqs=1)
    target, found = llm.engine().target, {}
    for length in range(LENGTH):
        for path in product(KEPT, repeat=length):
            tokens = [*PROMPT, *path]
            rows = Rows.prefill([tokens], [0], [[0]], 16, [len(tokens) - 1])
            found[path] = target.forward(rows)[0, list(KEPT)].double().numpy().copy()
    return found


def law(raw, path, params):
    """Probabilities of KEPT after a path."""
    x, counts = list(raw), Counter(path)
    for i, token in enumerate(KEPT):
        if token in PROMPT or token in counts:
            x[i] = x[i] / params.repetition_penalty if x[i] > 0 else x[i] * params.repetition_penalty
        x[i] -= params.presence_penalty * (counts[token] > 0) + params.frequency_penalty * counts[token]
    weights = [math.exp((value - max(x)) / params.temperature) for value in x]
    weights = [w if w >= params.min_p * max(weights) else 0.0 for w in weights]
    if params.top_k > 0:
        weights = [w if w >= sorted(weights)[-params.top_k] else 0.0 for w in weights]
    before, kept = 0.0, [0.0] * len(KEPT)
    for i in sorted(range(len(KEPT)), key=lambda i: -weights[i]):
        if before < params.top_p * sum(weights):
            kept[i] = weights[i]
        before += weights[i]
    return [w / sum(kept) for w in kept]


def p_value(llm, logits, params, samples):
    """Of a chi-square test of sequences of LENGTH tokens, rare ones pooled; 0 if one comes that cannot."""
    expected = {(): 1.0}
    for _ in range(LENGTH):
        expected = {
            (*path, token): weight * chance
            for path, weight in expected.items()
            for token, chance in zip(KEPT, law(logits[path], path, params), strict=True)
            if chance > 0
        }
    bias = {token: -100.0 for token in range(llm.vocab) if token not in KEPT}
    params = replace(params, n=AT_ONCE, max_tokens=LENGTH, ignore_eos=True, logit_bias=bias)
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(-(-samples // AT_ONCE)):
        seen.update(output.token_ids for output in llm.generate([PROMPT], params)[0].outputs)
    if seen.keys() - expected.keys():
        return 0.0
    total = sum(seen.values())
    cells = sorted((weight * total, seen[path]) for path, weight in expected.items())
    rare = [cell for cell in cells if cell[0] < 10]
    pooled = [*cells[len(rare) :], *([tuple(map(sum, zip(*rare, strict=True)))] if rare else [])]
    wanted, found = zip(*pooled, strict=True)
    return float(chisquare(found, np.array(wanted) * sum(found) / sum(wanted)).pvalue)


def samples(part, verify, count):
    slow = (pytest.mark.slow,) if count == MANY else ()
    return pytest.param(part, verify, count, marks=slow, id=f"{part}-{verify}-{count}")


@pytest.mark.parametrize(
    ("part", "verify", "count"),
    [
        *(samples(part, "traversal", FEW) for part in ("top_p", "min_p", "all")),
        *(samples(part, verify, MANY) for part in PARTS for verify in ("traversal", "rejection")),
    ],
)
def test_trees_keep_the_joint_law(pair, logits, part, verify, count):
    llm = LLM(*pair, SpeculativeConfig(tree="2,2", verify=verify), max_num_seqs=AT_ONCE)
    assert p_value(llm, logits, SamplingParams(**PARTS[part]), count) > 1e-4
    metrics = llm.metrics()
    assert metrics.drafted > metrics.accepted > metrics.trunk_accepted > 0


def test_penalties_that_do_not_see_the_path_are_caught(pair, logits):
    rows = SamplingBatch.rows

    def of_root(self, indices, layout, tokens):
        """Every node's penalties are its root's."""
        made = rows(self, indices, layout, tokens)
        return replace(made, depths=made.depths * 0)

    llm = LLM(*pair, SpeculativeConfig(tree="2,2"), max_num_seqs=AT_ONCE)
    params = SamplingParams(frequency_penalty=1.5)
    with patch.object(SamplingBatch, "rows", of_root):
        assert p_value(llm, logits, params, 2 * FEW) < 1e-6
