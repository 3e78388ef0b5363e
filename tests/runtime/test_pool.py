"""A pool of few blocks: trees shrink first, sequences are preempted and resume to the same output, nothing leaks."""

from collections import Counter
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lychee.runtime.checks import ParameterError
from lychee.runtime.controller import Fixed
from lychee.runtime.sampling_params import SamplingParams
from lychee.runtime.tree import TreeShape
from tests.runtime.pairs import (
    PROMPT,
    PROMPTS,
    drafting,
    following,
    greedy,
    make_llm,
    seeded,
    shared_llm,
    shown,
)

BLOCK = 4


def small(draft=None, num_blocks=12, **sizes):
    """An LLM with few blocks. Its engine stops where a leak would have it preempt and resume for ever."""
    llm = make_llm(draft, num_blocks=num_blocks, block_size=BLOCK, **sizes)
    step, left = llm.engine().step, iter(range(20000))

    def limited():
        assert next(left, None) is not None, "the engine makes no progress"
        return step()

    llm.engine().step = limited
    return llm


def check(engine):
    """Every block is free, or held as often as its reference count says."""
    pool, scheduler = engine.scheduler.pool, engine.scheduler
    held = Counter(chain.from_iterable(seq.blocks for seq in [*scheduler.running, *scheduler.waiting]))
    assert {block: refs for block, refs in enumerate(pool._refs) if refs} == held
    assert pool.num_free == pool.num_blocks - len(held)
    assert len(set(pool._free)) == len(pool._free)
    assert all(not seq.blocks for seq in scheduler.waiting)


def roomy(prompts, params):
    """What the requests give where there is room for all."""
    return [[shown(o) for o in output.outputs] for output in shared_llm().generate(prompts, params)]


def results(outputs):
    return [[shown(o) for o in output.outputs] for output in outputs]


# 18


@pytest.mark.parametrize("params", [greedy, seeded])
@pytest.mark.parametrize("num_blocks", [10, 11, 13, 16, 19, 22, 40])
@pytest.mark.parametrize("draft", [None, "near"])
def test_preempted_sequences_resume_to_the_same_output(draft, num_blocks, params):
    llm = small(draft, num_blocks)
    engine = llm.engine()
    outputs = llm.generate(PROMPTS, params())
    assert results(outputs) == roomy(PROMPTS, params())
    assert (engine.metrics.preemptions > 0) == (num_blocks < 40)
    check(engine)
    assert engine.scheduler.pool.num_free == num_blocks
    assert engine.idle


def test_a_preempted_sequence_loses_no_draft_kv_that_it_counts_on():
    """With the target as its own draft every proposal is accepted, also after the prefix moved to other blocks."""
    llm = small("same", 11)
    outputs = llm.generate(PROMPTS, greedy())
    assert llm.engine().metrics.preemptions > 0
    assert all(o.outputs[0].stats.accepted == o.outputs[0].stats.drafted > 8 for o in outputs)


@pytest.mark.parametrize("given_params", [{"presence_penalty": 1.0, "frequency_penalty": 0.5}, {"stop": "e"}])
def test_a_preempted_sequence_keeps_its_penalties_its_text_and_its_statistics(given_params):
    params = greedy(**given_params, logprobs=1)
    llm = small("near", 11)
    outputs = llm.generate(PROMPTS, params)
    assert results(outputs) == roomy(PROMPTS, params)
    assert llm.engine().metrics.preemptions > 0
    for output in outputs:
        (completion,) = output.outputs
        assert completion.stats.emitted == len(completion.token_ids) == len(completion.logprobs)


def test_a_preempted_stream_goes_on_where_it_was():
    llm = small("near", 11)
    stream, texts = llm.stream(PROMPTS, greedy()), [""] * len(PROMPTS)
    for chunk in stream:
        texts[chunk.request_id] += chunk.text
    assert llm.engine().metrics.preemptions > 0
    assert texts == [o[0][0] for o in roomy(PROMPTS, greedy())]


def test_the_latest_arrival_is_preempted():
    llm = small(num_blocks=9)
    stream, ends = llm.stream([[5, 6, 7]] * 4, greedy()), []
    for chunk in stream:
        if chunk.finish_reason:
            ends.append(chunk.request_id)
    assert llm.engine().metrics.preemptions > 0
    assert ends == [0, 1, 2, 3]


@pytest.mark.parametrize("num_blocks", [6, 7, 9, 10, 12, 24])
def test_the_tree_shrinks_before_anything_is_preempted(num_blocks):
    """A drafter that is always wrong costs no preemption that native decoding does without; a right one saves some."""
    prompts, params = [[5, 6, 7], [9, 8, 7]], greedy(max_tokens=16)  # 5 blocks each in the end
    references = shared_llm().generate(prompts, params)
    llm, missing, right = small(num_blocks=num_blocks), [], following(references)
    engine = llm.engine()

    def preemptions():
        llm.reset_metrics()
        outputs = llm.generate(prompts, params)
        assert results(outputs) == results(references)
        check(engine)
        return engine.metrics.preemptions

    def wrong(seq, length):
        missing.append(min(12, seq.limit - len(seq.tokens) - 1) - length)
        return [(token + 1) % llm.vocab for token in right(seq, length)]

    natively = preemptions()
    assert (natively > 0) == (num_blocks < 10)
    with drafting(llm, wrong, length=12):
        assert preemptions() == natively
    assert (max(missing) > 0) == (num_blocks < 10)
    with drafting(llm, right, length=12):
        assert preemptions() <= natively


def test_a_pool_without_room_for_a_rounds_nodes_drafts_what_fits():
    """The whole pool is the sequence's own 6 blocks: drafts end at its last slot."""
    prompt, params = [5, 6, 7], greedy(max_tokens=21)
    reference = shared_llm().generate([prompt], params)
    llm, asked = small(num_blocks=6), []
    right = following(reference)

    def script(seq, length):
        asked.append((seq.cached, length))
        return right(seq, length)

    with drafting(llm, script, length=16) as engine:
        (output,) = llm.generate([prompt], params)
        assert shown(output.outputs[0]) == shown(reference[0].outputs[0])
        assert all(cached + 1 + length <= 6 * BLOCK for cached, length in asked)
        assert engine.metrics.preemptions == 0


def test_blocks_of_rejected_nodes_are_given_back_after_the_round():
    llm = small(num_blocks=40)
    with drafting(llm, lambda seq, length: [0] * length, length=16) as engine:
        for _ in llm.stream([[5, 6, 7]], greedy()):
            for seq in engine.scheduler.running:
                assert len(seq.blocks) == engine.scheduler.pool.blocks_for(seq.cached + 1)
            check(engine)


@pytest.mark.parametrize("extra", [0, 1, 5])
def test_a_request_that_can_never_fit_is_refused_and_one_that_just_fits_is_not(extra):
    llm = small("near", num_blocks=6)
    largest = 6 * BLOCK - 3
    (output,) = llm.generate([[5, 6, 7]], greedy(max_tokens=largest))
    assert len(output.outputs[0].token_ids) == largest
    message = r"prompt and max_tokens make \d+ tokens, which need \d+ KV blocks of 4; the pool has 6"
    with pytest.raises(ParameterError, match=message):
        llm.generate([[5, 6, 7]], greedy(max_tokens=largest + 1 + extra))
    with pytest.raises(ParameterError, match=message):  # with one that fits before it
        llm.generate([[5], [5, 6, 7]], [greedy(max_tokens=2), greedy(max_tokens=largest + 1 + extra)])
    check(llm.engine())
    assert llm.engine().idle
    assert len(llm.generate([[5, 6, 7]], greedy(max_tokens=2))[0].outputs[0].token_ids) == 2


@pytest.mark.parametrize("max_num_batched_tokens", [1, 3, 7, 64])
@pytest.mark.parametrize("draft", [None, "near"])
def test_prompts_prefilled_in_chunks_give_the_same_output(draft, max_num_batched_tokens):
    llm = small(draft, 60, max_num_batched_tokens=max_num_batched_tokens)
    assert results(llm.generate(PROMPTS, greedy())) == roomy(PROMPTS, greedy())


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3])
def test_no_more_sequences_run_than_asked(max_num_seqs):
    llm = small("near", 60, max_num_seqs=max_num_seqs)
    most, scheduler = 0, llm.engine().scheduler
    stream = llm.stream(PROMPTS, greedy())
    for _ in stream:
        most = max(most, len(scheduler.running))
    assert most == max_num_seqs
    assert results(stream.outputs()) == roomy(PROMPTS, greedy())


@pytest.mark.parametrize("num_blocks", [14, 20, 60])
def test_completions_of_a_prompt_share_its_blocks(num_blocks):
    prompt = [5 + i % 9 for i in range(4 * BLOCK + 1)]
    llm = small("near", num_blocks)
    params = seeded(n=4, max_tokens=12)
    stream, most = llm.stream([prompt], params), 0
    for _ in stream:
        check(llm.engine())
        most = max(most, *llm.engine().scheduler.pool._refs)
    assert most == (4 if num_blocks == 60 else most) >= 2
    expected = roomy([prompt], params)
    assert results(stream.outputs()) == expected
    assert len({text for text, *_ in expected[0]}) == 4
    check(llm.engine())


def test_closing_a_stream_gives_its_blocks_back():
    llm = small("near", 20)
    stream = llm.stream(PROMPTS, greedy())
    for _ in range(3):
        next(stream)
    assert llm.engine().scheduler.pool.num_free < 20
    stream.close()
    assert llm.engine().scheduler.pool.num_free == 20
    assert llm.engine().idle
    assert [o.outputs[0].finish_reason for o in stream.outputs()] == ["abort"] * 4


REQUESTS = [
    ([5, 6, 7], greedy(max_tokens=9)),
    ([9] * 11, seeded(max_tokens=6)),
    ([1, 40, 41, 42, 43], greedy(max_tokens=14, frequency_penalty=0.5)),
    ([8] * 13, seeded(max_tokens=12, n=3)),
    ([77, 78], greedy(max_tokens=25)),
]


@pytest.fixture(scope="module")
def tiny_engines():
    """By draft: the LLM, with a pool of 8 blocks of 4 slots."""
    return {draft: small(draft, 8, max_num_seqs=3, max_num_batched_tokens=6) for draft in (None, "near")}


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, len(REQUESTS) - 1)),
            st.tuples(st.just("step"), st.integers(1, 6)),
            st.tuples(st.just("abort"), st.integers(0, 20)),
        ),
        max_size=30,
    ),
    draft=st.sampled_from([None, "near"]),
    length=st.integers(0, 7),
)
def test_under_a_random_schedule_no_block_leaks_and_every_output_is_right(tiny_engines, actions, draft, length):
    llm = tiny_engines[draft]
    engine = llm.engine()
    engine.controller = Fixed(TreeShape.chain(length))
    live, added = [], []
    for action, number in actions:
        if action == "add":
            prompt, params = REQUESTS[number]
            (request,) = llm._requests([prompt], params, draft is None)
            for seq in request.seqs:
                engine.add(seq)
                added.append((number, seq))
            live += request.seqs
        elif action == "step":
            for _ in range(number):
                engine.step()
                check(engine)
        elif live:
            engine.abort(live.pop(number % len(live)))
            check(engine)
        live = [seq for seq in live if not seq.finished]
    while not engine.idle:
        engine.step()
        check(engine)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    for number, seq in added:
        expected = known(number)[seq.sample_idx]
        if seq.finish_reason == "abort":
            assert seq.emitted == list(expected[1][: seq.num_emitted])
        else:
            assert (seq.text, tuple(seq.emitted), seq.finish_reason, seq.stop_reason) == expected


KNOWN = {}


def known(number):
    """Native decoding of a request with room for all."""
    if number not in KNOWN:
        prompt, params = REQUESTS[number]
        KNOWN[number] = roomy([prompt], params)[0]
    return KNOWN[number]


def test_unseeded_sampling_in_a_tiny_pool_ends_and_leaks_nothing():
    llm = small("near", 9)
    outputs = llm.generate([PROMPT] * 6, SamplingParams(max_tokens=20, ignore_eos=True))
    assert [len(o.outputs[0].token_ids) for o in outputs] == [20] * 6
    check(llm.engine())
