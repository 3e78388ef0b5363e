"""Verifying in one replayed program accepts what verifying op by op accepts, on the same logits."""

from dataclasses import replace

import pytest

from lychee.compiler import Buckets
from lychee.runtime.acceptance import accept
from lychee.runtime.controller import Fixed
from lychee.runtime.verifier import Verifier
from tests.kernels.batches import bits

from .pairs import PROMPTS, greedy, make_llm, seeded


class Both(Verifier):
    """Runs op by op and as a program, and asserts that they agree."""

    replayed = 0

    def run(self, rows, proposals, sampling):
        logits = self.target.model.forward(rows, self.target.kv).clone()
        want = accept(proposals, logits, sampling, self.vocab, self.lossless)
        stored = self.target.kv.storage.clone()
        got_logits, got = super().run(rows, proposals, sampling)
        self.replayed += len(self.buckets) > 0
        assert bits(got_logits) == bits(logits)
        assert (got.nodes, got.tokens) == (want.nodes, want.tokens)
        assert got.paths.tolist() == want.paths.tolist()
        assert bits(self.target.kv.storage) == bits(stored)
        return got_logits, got


@pytest.fixture(scope="module")
def llm():
    return make_llm("near", max_num_seqs=4)


def generate(llm, prompts, params, length=4, native=False):
    """How many rounds were verified by the program."""
    engine = llm.engine(native)
    before = engine.verifier, engine.controller
    engine.verifier = both = Both(engine.target, llm.vocab, True, Buckets(after=0))
    engine.controller = Fixed(0 if native else length)
    engine.kv.storage.fill_(0.25)
    try:
        llm.generate(prompts, params, native=native)
    finally:
        engine.verifier, engine.controller = before
    return both.replayed


@pytest.mark.parametrize("native", [False, True], ids=["speculative", "native"])
@pytest.mark.parametrize("params", [greedy(), seeded()], ids=["greedy", "seeded"])
def test_batches_and_chains_of_all_lengths_accept_the_same(llm, params, native):
    each = [replace(params, max_tokens=tokens) for tokens in (5, 11, 24, 30)]
    assert generate(llm, PROMPTS, each, 5, native) > 5


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 5, "top_p": 0.8, "min_p": 0.02},
        {"logit_bias": {5: 3.0, 9: -100.0}, "min_tokens": 9, "ignore_eos": False},
        {"n": 3},
        {"logprobs": 3},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_filters_biases_copies_and_logprobs_accept_the_same(llm, changes):
    assert generate(llm, PROMPTS[:2], replace(seeded(), **changes)) > 0


@pytest.mark.parametrize("changes", [{"presence_penalty": 0.5}, {"bad_words": ["the"]}, {"seed": None}])
def test_penalties_bad_words_and_rejection_run_op_by_op(llm, changes):
    assert generate(llm, PROMPTS[:2], replace(seeded(), **changes)) == 0
