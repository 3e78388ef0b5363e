"""Verifying in one replayed program accepts what verifying op by op accepts, on the same logits."""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from lychee.compiler import Buckets
from lychee.models.batch import Batch
from lychee.runtime.acceptance import Rule, accept
from lychee.runtime.controller import Fixed
from lychee.runtime.drafter import ScriptedDrafter
from lychee.runtime.tree import TreeShape
from lychee.runtime.verifier import Verifier
from tests.kernels.batches import bits

from .pairs import PROMPTS, greedy, make_llm, seeded


class Both(Verifier):
    """Runs op by op and as a program, and asserts that they agree."""

    replayed = 0

    def run(self, rows, proposals, sampling):
        logits = self.target.model.forward(Batch.of(rows), self.target.kv).clone()
        want = accept(proposals, logits, sampling, self.vocab, self.rule)
        stored = self.target.kv.storage.clone()
        got_logits, got = super().run(rows, proposals, sampling)
        self.replayed += len(self.buckets) > 0
        assert bits(got_logits) == bits(logits)
        assert got == want
        assert bits(self.target.kv.storage) == bits(stored)
        return got_logits, got


@pytest.fixture(scope="module")
def llm():
    return make_llm("near", max_num_seqs=4)


@contextmanager
def checked(llm, length=4, native=False):
    """The engine, whose verifier then says how many rounds the program verified."""
    engine = llm.engine(native)
    before = engine.verifier, engine.controller, engine.drafter
    engine.verifier = Both(engine.target, llm.vocab, Rule(), Buckets(after=0))
    engine.controller = Fixed(TreeShape.chain(0 if native else length))
    engine.scheduler.pool.forget()
    engine.kv.storage.fill_(0.25)
    try:
        yield engine
    finally:
        engine.verifier, engine.controller, engine.drafter = before


def generate(llm, prompts, params, length=4, native=False):
    """How many rounds were verified by the program."""
    with checked(llm, length, native) as engine:
        llm.generate(prompts, params, native=native)
        return engine.verifier.replayed


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


def test_requests_after_others_of_the_same_shapes_accept_by_their_own_parameters(llm):
    with checked(llm) as engine:
        for params in (greedy(), seeded(), seeded(seed=8), seeded(temperature=1.5, top_k=3), greedy()):
            llm.generate(PROMPTS[:2], params)
        assert engine.verifier.replayed > 10


def test_rows_of_other_lengths_in_the_same_bucket_are_drawn_with_their_own_noise(llm):
    """Two sequences draft one and three tokens by turns: rows, sequences and depth of all rounds are the same."""

    def script(seq, length):
        return [5, 6, 7][: 1 if (seq.seq_id + seq.stats.rounds) % 2 else 3]

    with checked(llm, length=3) as engine:
        engine.drafter = ScriptedDrafter(script, llm.vocab)
        llm.generate(PROMPTS[:2], [seeded(), seeded(seed=8)])
        assert engine.verifier.replayed > 5
