"""The prefix cache: what begins alike is computed once, and no output, no draft and no other request can tell."""

import numpy as np
import pytest

from lychee.runtime.checks import ParameterError
from lychee.runtime.config import EngineConfig, SpeculativeConfig
from lychee.runtime.prefix_cache import PrefixCache
from lychee.runtime.sampling_params import SamplingParams
from tests.factory import make_model_dir
from tests.runtime.pairs import greedy, make_llm, model_dir, seeded, shown
from tests.runtime.shared_blocks import watched
from tests.runtime.test_engine_families import CONFIGS

BLOCK = 4
SYSTEM = [5 + i % 11 for i in range(4 * BLOCK)]
ALIKE = [SYSTEM, [*SYSTEM, 40, 41, 42], [*SYSTEM, 40, 41, 42], [*SYSTEM[:9], 50], [*SYSTEM, 40, 41, 42, 43, 44]]


def small(draft=None, num_blocks=64, **given):
    return make_llm(draft, num_blocks=num_blocks, block_size=BLOCK, **given)


def results(outputs):
    return [[shown(o) for o in output.outputs] for output in outputs]


def cached(outputs):
    return [o.stats.cached_tokens for output in outputs for o in output.outputs]


def expected(params, prompts=ALIKE, **given):
    """Native decoding without the cache."""
    return results(small(prefix_cache=False, **given).generate(prompts, params))


SHAPES = {
    "native": (None, None),
    "chain": ("near", SpeculativeConfig(num_speculative_tokens=4)),
    "accepted whole": ("same", SpeculativeConfig(num_speculative_tokens=3)),
    "tree": ("near", SpeculativeConfig(tree="3,2")),
}


@pytest.mark.parametrize("num_blocks", [12, 64])
@pytest.mark.parametrize("params", [greedy(logprobs=2), seeded(n=2, max_tokens=18)], ids=["greedy", "seeded"])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_are_those_without_it_and_nothing_shared_is_written(shape, params, num_blocks):
    draft, config = SHAPES[shape]
    llm = small(draft, num_blocks, config=config)
    want = expected(params)
    with watched(llm):
        for _ in range(2):
            alone = [llm.generate([prompt], params)[0] for prompt in ALIKE]
            together = llm.generate(ALIKE, params)
            assert results(alone) == results(together) == want
            stream = llm.stream(ALIKE, params)
            for _ in range(4):
                next(stream)
            stream.close()  # aborted, some of them in their prefill
    assert sum(cached(together)) > 0
    assert (llm.metrics().preemptions > 0) == (num_blocks == 12)
    assert llm.engine().scheduler.pool.num_free == num_blocks


def test_the_logits_of_a_hit_are_those_of_a_miss_to_the_bit():
    llm, params = small(), greedy(max_tokens=6, logprobs=5)
    first, again = (llm.generate([ALIKE[-1]], params)[0].outputs[0] for _ in range(2))
    assert (first.stats.cached_tokens, again.stats.cached_tokens) == (0, 20)
    assert first.logprobs == again.logprobs


@pytest.mark.parametrize("length", [4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1])
def test_a_hit_computes_what_follows_its_full_blocks_and_a_full_one_the_last_token_alone(length, monkeypatch):
    llm, computed = small(), []
    forward = llm.engine().target.forward
    monkeypatch.setattr(llm.engine().target, "forward", lambda rows: computed.append(len(rows.tokens)) or forward(rows))
    prompt, params = list(range(5, 5 + length)), greedy(max_tokens=1)
    found = [llm.generate([prompt], params)[0].outputs[0].stats.cached_tokens for _ in range(3)]
    hit = length - 1 if length % BLOCK == 0 else length // BLOCK * BLOCK
    assert found == [0, hit, hit]
    assert computed == [length, length - hit, length - hit]


def test_requests_that_run_share_full_blocks_and_the_last_one_of_a_full_hit_is_copied():
    llm, params = small("near"), greedy(max_tokens=40)
    want = expected(params, [SYSTEM])
    first, second = llm.stream([SYSTEM], params), llm.stream([SYSTEM], params)
    with watched(llm):
        for _ in range(3):  # the prompt is settled, then
            next(first)
        next(second)
        one, two = (seq.blocks for seq in llm.engine().scheduler.running)
        assert one[:3] == two[:3]
        assert not set(one[3:]) & set(two[3:])
        for stream in (second, first):
            list(stream)
            assert results(stream.outputs()) == want
    assert cached(second.outputs()) == [len(SYSTEM) - 1]


def test_another_salt_never_hits():
    llm, params = small(), greedy(max_tokens=2)
    salts = [None, "a", "b", "a", None, "c"]
    found = [cached(llm.generate([SYSTEM], params, cache_salt=salt))[0] for salt in salts]
    assert found == [0, 0, 0, len(SYSTEM) - 1, len(SYSTEM) - 1, 0]


@pytest.mark.parametrize("salt", ["", 3, b"a"])
def test_a_salt_is_text(salt):
    with pytest.raises(ParameterError, match=r"cache_salt is .*, must be text of at least one character, or None"):
        small().generate([SYSTEM], greedy(max_tokens=1), cache_salt=salt)


def test_without_it_only_the_completions_of_a_prompt_share_blocks():
    llm, params = small(prefix_cache=False), seeded(n=3, max_tokens=3)
    for _ in range(2):
        assert cached(llm.generate([[*SYSTEM, 40]], params)) == [0, len(SYSTEM), len(SYSTEM)]
    assert not llm.engine().scheduler.pool._keys
    with pytest.raises(ParameterError, match="prefix_cache is 1, must be True or False"):
        EngineConfig(prefix_cache=1)


def test_an_answer_is_part_of_the_next_turns_prefix():
    llm, params = small("near"), greedy(max_tokens=10)
    (answer,) = llm.generate([SYSTEM], params)[0].outputs
    turn = [*SYSTEM, *answer.token_ids, 60, 61]
    with watched(llm):
        outputs = llm.generate([turn], params)
    assert cached(outputs) == [24]  # of 25 that have KV
    assert results(outputs) == expected(params, [turn])


# The draft's validity


def run(llm, prompt, params, speculates):
    (seq,) = llm.maker.sequences(prompt, params, 1000)
    seq.speculates = speculates
    llm.engine().add(seq)
    while not llm.engine().idle:
        llm.engine().step()
    return seq


@pytest.mark.parametrize("first", [True, False])
def test_a_prefix_without_the_drafts_kv_is_drafted_from_as_one_with_it(first):
    """With the target as its own draft every proposal is accepted, unless the draft counts on KV that it lacks."""
    llm, params = small("same"), greedy(max_tokens=21)
    with watched(llm):
        answer = run(llm, ALIKE[1], params, first)
        prompt = answer.tokens[:-3]
        hit, drafted = len(prompt) // BLOCK * BLOCK, []
        catch_up = llm.engine().drafter._catch_up
        llm.engine().drafter._catch_up = lambda seqs, whole: (
            drafted.extend(s.draft_cached for s in seqs) or catch_up(seqs, whole)
        )
        seqs = [run(llm, prompt, params, True) for _ in range(2)]
    assert [seq.stats.cached_tokens for seq in seqs] == [hit, hit]
    assert (drafted[0] > 0) == first
    assert all(seq.stats.accepted == seq.stats.drafted > 8 for seq in seqs)
    assert seqs[0].emitted == seqs[1].emitted


def test_sequences_that_share_blocks_without_the_drafts_kv_fill_them_once():
    llm, params = small("same", max_num_batched_tokens=6), greedy(max_tokens=12)
    run(llm, [*SYSTEM, 40], greedy(max_tokens=8), False)
    rows, drafter = [], llm.engine().drafter
    forward = drafter.compiled.forward
    drafter.compiled.forward = lambda given: rows.append(given.slots.tolist()) or forward(given)
    with watched(llm):
        outputs = llm.generate([[*SYSTEM, 40 + i, 50] for i in range(3)], params)
    assert cached(outputs) == [len(SYSTEM)] * 3
    shared = [slot for slots in rows for slot in slots if slot < len(SYSTEM)]
    assert sorted(shared) == list(range(len(SYSTEM)))
    assert all(o.outputs[0].stats.accepted == o.outputs[0].stats.drafted > 3 for o in outputs)


def test_of_a_prefix_with_holes_the_draft_fills_the_holes_alone():
    llm, params = small("same"), greedy(max_tokens=21)
    answer, pool = run(llm, ALIKE[1], params, True), llm.engine().scheduler.pool
    for key in (answer.keys[0], answer.keys[3]):
        pool.drafted[pool.find(key)] = 1
    with watched(llm):
        seq = run(llm, answer.tokens[:-3], params, True)
    assert seq.stats.cached_tokens == 36
    assert seq.stats.accepted == seq.stats.drafted > 8


def test_a_draft_of_a_shorter_context_leaves_blocks_that_only_the_target_has(tmp_path):
    draft = make_model_dir(tmp_path, noise_of=model_dir("T"), max_position=24)
    llm, params, prompts = small(draft), greedy(max_tokens=30), [SYSTEM, [*SYSTEM, 3], SYSTEM]
    with watched(llm):
        outputs = [llm.generate([prompt], params)[0] for prompt in prompts]
    assert cached(outputs) == [0, len(SYSTEM), len(SYSTEM) - 1]
    assert results(outputs) == expected(params, prompts)
    pool = llm.engine().scheduler.pool
    assert {pool.drafted[block] for block in pool._keys} >= {0, BLOCK}


# Preemption, eviction


def test_a_preempted_sequence_computes_only_what_is_gone():
    prompts = [[5 + i, 6, 7, 8, 9, 10, 11, 12, 13] for i in range(3)]
    llm, params = small("near", 16), greedy(max_tokens=22)
    with watched(llm):
        outputs = llm.generate(prompts, params)
    metrics = llm.metrics()
    assert results(outputs) == expected(params, prompts)
    assert metrics.preemptions > 0
    assert 0 < metrics.prefix_cache_hits < metrics.prefix_cache_queries
    assert cached(outputs) == [0, 0, 0]  # of the prompts


def test_what_is_out_of_use_for_longest_makes_room():
    llm, params = small(num_blocks=16), greedy(max_tokens=1)
    prompts = [[10 * i + j for j in range(1, 4 * BLOCK + 2)] for i in range(1, 5)]  # four full blocks, and a token

    def hits(*order):
        return [cached(llm.generate([prompts[i]], params))[0] for i in order]

    assert hits(0, 1, 2, 0) == [0, 0, 0, 16]
    assert hits(3, 0, 2) == [0, 16, 16]
    assert hits(1) == [12]  # its last block had to go


def test_of_a_prefix_the_end_is_evicted_first():
    llm, params = small(num_blocks=8), greedy(max_tokens=1)
    long, other = list(range(10, 31)), [40] * 9
    llm.generate([long], params)
    llm.generate([other], params)  # takes three blocks, where three are free
    assert cached(llm.generate([long], params)) == [20]
    llm.generate([[50] * 17], params)  # takes five
    found = cached(llm.generate([long], params))[0]
    assert 0 < found < 20


def test_warming_up_forgets_what_it_overwrites():
    llm, params = small("near"), greedy(max_tokens=8)
    want = results(llm.generate([SYSTEM], params))
    llm.warm_up()
    outputs = llm.generate([SYSTEM], params)
    assert cached(outputs) == [0]
    assert results(outputs) == want


# What else a model may have


@pytest.mark.parametrize("config", CONFIGS)
def test_families_give_the_same_with_it(tmp_path, config):
    target = make_model_dir(tmp_path / "target", **CONFIGS[config])
    draft = make_model_dir(tmp_path / "draft", noise_of=target, noise=0.05, **CONFIGS[config])
    llm, params = small(draft, target=target), greedy(max_tokens=30)
    prompts = [[*SYSTEM, *SYSTEM, *tail] for tail in ([], [40], [40, 41], [])]
    with watched(llm):
        outputs = [llm.generate([prompt], params)[0] for prompt in prompts]
    assert cached(outputs) == [0, 32, 32, 31]
    assert results(outputs) == expected(params, prompts, target=target)


def test_an_int8_cache_is_copied_with_its_scales():
    llm, params = small("near", kv_cache_dtype="int8"), greedy(max_tokens=20)
    with watched(llm):
        first, second = llm.stream([SYSTEM], params), llm.stream([SYSTEM], params)
        for _ in range(3):
            next(first)
        list(second), list(first)
    assert cached(second.outputs()) == [len(SYSTEM) - 1]
    want = expected(params, [SYSTEM], kv_cache_dtype="int8")
    assert results(first.outputs()) == results(second.outputs()) == want


def test_hits_are_counted():
    llm = small()
    for _ in range(2):
        llm.generate([ALIKE[1]], greedy(max_tokens=3))
    totals = llm.metrics().totals()
    assert (totals["prefix_cache_queries"], totals["prefix_cache_hits"]) == (2 * len(ALIKE[1]), len(SYSTEM))
    assert llm.generate([SYSTEM], greedy(max_tokens=1))[0].outputs[0].stats.report()["cached_tokens"] == len(SYSTEM) - 1


# Controls: these tests see the faults that they are there for


def test_a_key_without_the_tokens_before_it_is_noticed(monkeypatch):
    def orphans(self, seq, count):
        size = self.pool.block_size
        return [np.array(seq.tokens[i * size : (i + 1) * size]).tobytes() for i in range(count)]

    monkeypatch.setattr(PrefixCache, "_keys", orphans)
    llm, params = small(), greedy()
    prompts = [SYSTEM, [*SYSTEM[8:], *SYSTEM[:8], 9]]
    assert results([llm.generate([p], params)[0] for p in prompts]) != expected(params, prompts)


def test_a_write_in_a_shared_block_is_noticed(monkeypatch):
    llm, params = small(), greedy(max_tokens=4)
    pool = llm.engine().scheduler.pool
    llm.generate([SYSTEM], params)
    monkeypatch.setattr(pool, "claim", lambda block: pool.share([block]))
    with watched(llm), pytest.raises(AssertionError, match="the target writes in a block that is shared"):
        llm.generate([SYSTEM], params)


def test_stale_kv_of_the_draft_is_noticed(monkeypatch):
    llm, params = small("same"), greedy(max_tokens=21)
    llm.engine().drafter.kv.storage.zero_()
    prompt = run(llm, ALIKE[1], params, False).tokens[:-3]
    pool = llm.engine().scheduler.pool
    for block in pool._keys:
        pool.drafted[block] = BLOCK
    seq = run(llm, prompt, params, True)
    assert seq.stats.accepted < seq.stats.drafted


def test_unseeded_sampling_goes_on_from_a_hit():
    llm = small("near", 20)
    params = SamplingParams(max_tokens=20, ignore_eos=True, n=2)
    with watched(llm):
        outputs = llm.generate(ALIKE, params)
    assert [len(o.token_ids) for output in outputs for o in output.outputs] == [20] * 10
