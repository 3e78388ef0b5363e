"""Speculation is switched off per request; rounds that draft nothing are counted with their reason."""

import pytest

from lychee.runtime.checks import ParameterError
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


def long_prompt_arrives(llm):
    """Chunks of prompts while a stream decodes and a prompt of 40 tokens comes; and all that both emit."""
    engine, chunks = llm.engine(), []
    (stream,), (late,) = (
        llm.maker.sequences(ids, greedy(max_tokens=most), i) for i, (ids, most) in enumerate([([3], 60), ([4] * 40, 9)])
    )
    real = engine._prefill
    engine._prefill = lambda work: chunks.append(sum(c.stop - c.start for c in work)) or real(work)
    engine.add(stream)
    for _ in range(3):
        engine.step()
    engine.add(late)
    before = len(chunks)
    while not engine.idle:
        engine.step()
    return chunks[before:], (shown_of(stream), shown_of(late)), late.stats


def test_a_long_prompt_is_prefilled_in_chunks_of_the_budget_while_others_decode():
    expected = long_prompt_arrives(make_llm())[1]
    chunks, shown, _ = long_prompt_arrives(make_llm(prefill_budget=16))
    assert chunks == [16, 16, 8]
    assert shown == expected


def test_the_draft_reads_one_pass_of_a_long_prompt_in_a_round_that_others_wait_for():
    expected = long_prompt_arrives(make_llm())[1]
    llm = make_llm("same", max_num_batched_tokens=16)
    lags, engine = [], llm.engine()
    real = engine.drafter._catch_up
    engine.drafter._catch_up = lambda seqs, whole: (lags.append(whole), real(seqs, whole))
    _, shown, late = long_prompt_arrives(llm)
    assert shown == expected
    assert llm.metrics().native_rounds["behind"] == 2  # 39 tokens, 16 a round
    assert late.rounds_native >= 2
    assert late.accepted > 0
    assert {True, False} == set(lags)


def test_a_budget_beyond_a_steps_tokens_is_refused():
    with pytest.raises(ParameterError, match="prefill_budget is 65, must be at most max_num_batched_tokens, 64"):
        make_llm(prefill_budget=65, max_num_batched_tokens=64)
