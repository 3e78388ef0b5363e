"""A drafter that is wrong, adversarial or out of step costs speed for a while, and never changes the output."""

import pytest

from lychee.runtime.config import SpeculativeConfig
from lychee.runtime.controller import Window
from tests.runtime.pairs import (
    PROMPT,
    PROMPTS,
    completion,
    drafting,
    following,
    greedy,
    make_llm,
    seeded,
    shared_llm,
    shown,
)

# 21: a drafter that is always wrong


@pytest.mark.parametrize("params", [greedy, seeded])
def test_a_drafter_that_is_always_wrong_falls_back_to_native_speed(params, monkeypatch):
    llm = shared_llm()
    given = params(max_tokens=200)
    reference = llm.generate(PROMPT, given)
    right = following(reference)
    wrong = lambda seq, length: [(t + 1) % llm.vocab for t in right(seq, length)]  # noqa: E731
    with drafting(llm, wrong, controller=Window(16, 0.4)) as engine:
        seen, run = [], engine._rows

        def verify_rows(seqs, proposals):
            seen.append(sum(len(tree.tokens) for tree in proposals.trees))
            return run(seqs, proposals)

        monkeypatch.setattr(engine, "_rows", verify_rows)
        output = completion(llm, PROMPT, given)
        assert engine.controller._history == {}  # nothing is kept of a request that ended
    assert shown(output) == shown(reference[0].outputs[0])
    assert output.stats.accepted == 0
    assert len(seen) == len(output.token_ids) - 1  # rounds; a prefill emits the first token
    assert sum(seen[-100:]) < 1.1 * 100  # rows that the target ran, where native decoding runs one a token


@pytest.mark.parametrize("tree", ["chain", "auto"])
@pytest.mark.parametrize("params", [greedy, seeded])
def test_an_unrelated_draft_model_changes_nothing(params, tree):
    llm = make_llm("far", config=SpeculativeConfig(tree=tree))
    given = params(max_tokens=120)
    references = llm.generate(PROMPTS, given, native=True)
    outputs = llm.generate(PROMPTS, given)
    assert [shown(o.outputs[0]) for o in outputs] == [shown(o.outputs[0]) for o in references]
    totals = llm.metrics().totals()
    assert (totals["acceptance_rate"] or 0.0) < 0.2
    assert llm.metrics().drafted < 0.8 * llm.metrics().emitted


@pytest.mark.parametrize("proposed", [0, 1, 3, 9])
def test_a_drafter_may_propose_fewer_or_more_tokens_than_asked(proposed):
    llm = shared_llm()
    reference = llm.generate(PROMPT, greedy())
    right = following(reference)
    with drafting(llm, lambda seq, _: right(seq, proposed)):
        output = completion(llm, PROMPT, greedy())
    assert shown(output) == shown(reference[0].outputs[0])
    assert output.stats.drafted == output.stats.accepted
