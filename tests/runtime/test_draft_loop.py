"""Drafting in one replayed program proposes what drafting level by level proposes, and from the same distributions."""

from dataclasses import dataclass, replace

import pytest

from lychee.compiler import Buckets
from lychee.runtime.config import SpeculativeConfig
from lychee.runtime.controller import Fixed
from lychee.runtime.drafter import ModelDrafter
from lychee.runtime.goes_on import Always
from lychee.runtime.tree import TreeShape
from tests.kernels.batches import bits

from .pairs import PROMPTS, greedy, make_llm, seeded

SAMPLED = seeded(seed=None)
# Rejection with a seed draws the same noise however it is drafted.
REJECTION = {"verify": "rejection"}


@pytest.fixture(scope="module", params=["auto", "rejection"])
def llm(request):
    config = SpeculativeConfig(num_speculative_tokens=4, verify=request.param)
    return make_llm("near", config=config, max_num_seqs=4)


class Both(ModelDrafter):
    """Proposes level by level, and asserts that the program proposes the same and stores the same."""

    looped = ()
    """How many sequences drafted in each round of the program."""

    def propose(self, batch, shapes, goes_on=None):
        active = [seq for seq, shape in zip(batch.seqs, shapes, strict=True) if shape.num_nodes > 1]
        self._catch_up(active, whole=True)
        storage = self.kv.storage.clone()
        self.loop.binds = False
        want = super().propose(batch, shapes, goes_on)
        after = self.kv.storage.clone()
        self.loop.binds = True
        self.kv.storage.copy_(storage)
        self.by_level = False
        got = super().propose(batch, shapes, goes_on)
        self.looped += (len(active),) if active and not self.by_level else ()
        assert got.trees == want.trees
        assert (got.draft_log_probs is None) == (want.draft_log_probs is None)
        if want.draft_log_probs is not None:
            assert bits(got.draft_log_probs) == bits(want.draft_log_probs)
        assert bits(self.kv.storage) == bits(after)
        return got

    def _level_by_level(self, *given):
        self.by_level = True
        return super()._level_by_level(*given)


def generate(llm, prompts, params, shape=4, goes_on=None):
    """How many sequences drafted in each round of the program. A number is a chain's length."""
    engine = llm.engine()
    drafter, controller = engine.drafter, engine.controller
    both = Both(drafter.model, drafter.kv, drafter.pool, drafter.vocab, drafter.max_num_batched_tokens)
    both.loop.buckets = Buckets(after=0)
    drafter.pool.forget()
    both.kv.storage.fill_(0.25)  # what was never stored may be read by rows that are not used: the same in both
    shape = shape if isinstance(shape, TreeShape) else TreeShape.chain(shape)
    engine.drafter, engine.controller = both, Fixed(shape, goes_on)
    try:
        llm.generate(prompts, params)
    finally:
        engine.drafter, engine.controller = drafter, controller
    return both.looped


@pytest.mark.parametrize("length", [1, 2, 5, 9])
@pytest.mark.parametrize("params", [greedy(), seeded(), SAMPLED], ids=["greedy", "seeded", "sampled"])
def test_a_batch_of_any_length_drafts_the_same(llm, params, length):
    assert len(generate(llm, PROMPTS, params, length)) > 2


TREES = {"wide": TreeShape((-1, 0, 1, 0, 0)), "both": TreeShape((-1, 0, 1, 2, 0, 1, 1, 4, 7))}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("params", [greedy(), seeded(), SAMPLED], ids=["greedy", "seeded", "sampled"])
def test_trees_draft_the_same(llm, params, tree):
    assert len(generate(llm, PROMPTS, params, TREES[tree])) > 2


@dataclass(frozen=True)
class Surely:
    """Drafts on where the trunk's last node is sure enough, so that sequences of a batch stop at different depths."""

    levels: int

    def __call__(self, seq_id, depth, confidences):
        assert len(confidences) == depth
        assert all(0 < confidence <= 1 for confidence in confidences)
        return confidences[-1] > 0.3


@pytest.mark.parametrize("tree", ["chain", *TREES])
@pytest.mark.parametrize("params", [greedy(), seeded(), SAMPLED], ids=["greedy", "seeded", "sampled"])
def test_trees_that_are_drafted_in_parts_draft_the_same(llm, params, tree):
    assert generate(llm, PROMPTS, params, TREES.get(tree, 6), Surely(1 + (tree == "chain")))


@pytest.mark.parametrize("tree", ["chain", *TREES])
def test_whether_a_tree_is_drafted_in_parts_makes_no_difference(llm, tree):
    engine, kept = llm.engine(), []
    shape = TREES.get(tree, TreeShape.chain(6))
    seed = [replace(seeded(), seed=5)] * 2
    for goes_on in (None, Always(1), Always(3)):
        with_rounds, controller = [], engine.controller
        engine.controller = Fixed(shape, goes_on)
        try:
            with_rounds = [(c.token_ids, c.stats.rounds) for o in llm.generate(PROMPTS[:2], seed) for c in o.outputs]
        finally:
            engine.controller = controller
        kept.append(with_rounds)
    assert kept[0] == kept[1] == kept[2]


@pytest.mark.parametrize("changes", [{"top_k": 2}, {"top_p": 0.3}, {"logit_bias": {5: 3.0}}, {"n": 2}])
def test_trees_with_fewer_tokens_than_children_draft_the_same(llm, changes):
    assert generate(llm, PROMPTS[:2], replace(seeded(), **changes), TREES["both"])


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 5, "top_p": 0.8, "min_p": 0.02},
        {"logit_bias": {5: 3.0, 9: -100.0}, "min_tokens": 9, "ignore_eos": False},
        {"n": 3},
        {"stop": ["e"]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_filters_biases_and_copies_draft_the_same(llm, changes):
    assert generate(llm, PROMPTS[:2], replace(seeded(), **changes))


def test_sequences_that_end_at_different_places_draft_the_same(llm):
    each = [replace(seeded(), max_tokens=tokens) for tokens in (5, 11, 24, 30)]
    assert len(generate(llm, PROMPTS, each, 6)) > 2


@pytest.mark.parametrize("changes", [{"presence_penalty": 0.5}, {"repetition_penalty": 1.3}, {"bad_words": ["the"]}])
def test_what_depends_on_tokens_just_drawn_is_drafted_level_by_level(llm, changes):
    assert not generate(llm, PROMPTS[:2], replace(seeded(), **changes))


def test_requests_of_two_kinds_of_noise_draft_level_by_level_while_they_are_together():
    llm = make_llm("near", max_num_seqs=4)
    both = [replace(SAMPLED, max_tokens=6), replace(seeded(), max_tokens=30)]
    assert set(generate(llm, PROMPTS[:2], both, 2)) == {1}


def test_weights_that_are_not_finite_are_reported(llm):
    drafter = llm.engine().drafter
    weight = drafter.model.weights.norm
    kept = weight.clone()
    weight.fill_(float("nan"))
    try:
        drafter.loop.buckets = Buckets(after=0)
        with pytest.raises(ArithmeticError, match="the draft model's logits are not finite"):
            llm.generate(PROMPTS[0], greedy())
    finally:
        weight.copy_(kept)
