"""Speculation is switched off per request; rounds that draft nothing are counted with their reason."""

import pytest

from lychee.runtime.config import SpeculativeConfig
from tests.runtime.pairs import PROMPTS, K, greedy, make_llm, seeded, shown


def run(llm, speculates):
    """The prompts together, each with speculation or without; what they emit, and their rounds and drafted tokens."""
    engine, params = llm.engine(), [greedy(), seeded(), greedy(), seeded()]
    seqs = []
    for i, (prompt, sampling, wanted) in enumerate(zip(PROMPTS, params, speculates, strict=True)):
        (seq,) = llm.maker.sequences(prompt, sampling, i)
        seq.speculates = wanted
        engine.add(seq)
        seqs.append(seq)
    while not engine.idle:
        engine.step()
    return seqs


@pytest.mark.parametrize("speculates", [(True, False, False, True), (False,) * 4])
def test_speculation_off_for_some_requests_of_a_batch_changes_no_output(speculates):
    llm = make_llm("near")
    seqs = run(llm, speculates)
    references = [llm.generate(s.prompt, s.params, native=True)[0].outputs[0] for s in seqs]
    assert [shown_of(s) for s in seqs] == [shown(r) for r in references]
    assert [s.stats.drafted > 0 for s in seqs] == list(speculates)
    off = sum(s.stats.rounds for s in seqs if not s.speculates)
    assert llm.metrics().native_rounds["off"] == off > 0


def shown_of(seq):
    return seq.text, tuple(seq.emitted), seq.finish_reason, seq.stop_reason


def test_native_rounds_are_counted_by_reason():
    llm = make_llm()
    llm.generate(PROMPTS[0], greedy(max_tokens=5))
    assert llm.metrics().native_rounds == {"no_draft": 4}
    llm = make_llm("same")
    llm.generate(PROMPTS[0], greedy(max_tokens=K + 3))  # a prefill, K + 1 of a round, and one that may not draft
    assert llm.metrics().native_rounds == {"limit": 1}
    llm = make_llm("same", config=SpeculativeConfig(max_draft_len=0))
    llm.generate(PROMPTS[0], greedy(max_tokens=5))
    assert llm.metrics().native_rounds == {"planned": 4}
    llm = make_llm("far", num_blocks=13, block_size=1)
    llm.generate([[3, 4, 5], [6, 7, 8]], greedy(max_tokens=9))
    metrics = llm.metrics()
    assert metrics.native_rounds["blocks"] > 0
    assert metrics.native_rounds.total() == metrics.rounds - metrics.drafted_at[0]


def test_a_renewed_engine_answers_as_before_and_keeps_the_metrics():
    llm = make_llm("near")
    before = llm.generate(PROMPTS, greedy())
    rounds, engine = llm.metrics().rounds, llm.engine()
    assert llm.renew_engine() is llm.engine()
    assert llm.engine() is not engine
    assert llm.metrics().rounds == rounds > 0
    after = llm.generate(PROMPTS, greedy())
    assert [shown(o.outputs[0]) for o in after] == [shown(o.outputs[0]) for o in before]
