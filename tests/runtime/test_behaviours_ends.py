"""What ends a completion binds inside an accepted path, and everything after the end is dropped."""

import itertools
import json
import math

import pytest
import torch

from lychee.runtime.controller import Fixed
from lychee.runtime.tree import TreeShape
from tests.factory import make_model_dir
from tests.runtime.pairs import (
    PROMPT,
    PROMPTS,
    K,
    completion,
    drafting,
    following,
    forcing,
    greedy,
    make_llm,
    model_dir,
    root,
    seeded,
    shared_llm,
    shown,
)

SENTENCE = " how many lychees are in the basket? There are twelve lychees in it"


def sentence(llm, length=2 * K + 3):
    ids = llm.tokenizer.encode(SENTENCE, add_bos=False)[:length]
    assert len(ids) == length
    return ids


# 1: the end of the text inside a block


@pytest.mark.parametrize("length", [0, 1, 2, 3, K, 7])
@pytest.mark.parametrize("kind", ["sentencepiece", "bpe"])
def test_an_end_of_sequence_token_ends_the_text_at_every_position_of_an_accepted_path(kind, length):
    llm = shared_llm(kind=kind)
    prompt, body, eos = llm.tokenizer.encode(PROMPT), sentence(llm), llm.tokenizer.eos_id
    for at in range(len(body)):
        spoken = [*body[:at], eos, *body[at:]]
        with forcing(llm, prompt, spoken, length):
            output = completion(llm, PROMPT, greedy(max_tokens=len(spoken), ignore_eos=False, logprobs=0))
        text = llm.tokenizer.decode(body[:at], continuation=True)
        assert shown(output) == (text, (*body[:at], eos), "stop", None)
        assert [entry.token_id for entry in output.logprobs] == [*body[:at], eos]
        stats = output.stats
        assert stats.emitted == at + 1
        assert stats.accepted == stats.drafted <= at  # all was accepted, and nothing past the end is counted
        assert sum(stats.drafted_at) == sum(stats.accepted_at) == stats.drafted


@pytest.mark.parametrize("params", [greedy, seeded])
@pytest.mark.parametrize("draft", ["follow", "same", "near"])
def test_a_stop_token_ends_where_native_decoding_ends(draft, params):
    llm = shared_llm() if draft == "follow" else shared_llm(draft)
    reference = llm.generate(PROMPT, params(max_tokens=2 * K + 3), native=True)
    tokens = reference[0].outputs[0].token_ids
    for token in dict.fromkeys(tokens):
        ending = params(max_tokens=2 * K + 3, stop_token_ids=[token], logprobs=2)
        expected = completion(llm, PROMPT, ending, native=True)
        assert expected.token_ids == tokens[: tokens.index(token) + 1]
        assert (expected.finish_reason, expected.stop_reason) == ("stop", token)
        if draft == "follow":
            with drafting(llm, following(reference)):
                output = completion(llm, PROMPT, ending)
        else:
            output = completion(llm, PROMPT, ending)
        assert shown(output) == shown(expected)
        assert_same_logprobs(output.logprobs, expected.logprobs)
        assert output.stats.emitted == len(expected.token_ids)


def assert_same_logprobs(ours, theirs):
    assert [entry.token_id for entry in ours] == [entry.token_id for entry in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert math.isclose(a.logprob, b.logprob, abs_tol=1e-4)
        assert a.top.keys() == b.top.keys()


def test_one_sequence_that_ends_inside_a_path_leaves_the_others_of_the_batch_alone():
    llm = shared_llm()
    references = llm.generate(PROMPTS, greedy(), native=True)
    first = references[0].outputs[0].token_ids
    token = next(t for t in first[2 : K + 1] if first.index(t) >= 2)  # inside the first accepted path
    params = [greedy(stop_token_ids=[token]), greedy(), greedy(), greedy()]
    expected = llm.generate(PROMPTS, params, native=True)
    with drafting(llm, following(references)) as engine:
        outputs = llm.generate(PROMPTS, params)
        assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    assert [shown(o.outputs[0]) for o in outputs] == [shown(o.outputs[0]) for o in expected]


@pytest.mark.parametrize("draft", ["right", "right then wrong", "wrong"])
def test_the_kv_of_committed_tokens_is_native_decodings(draft):
    """Rejected nodes leave nothing behind: what is cached is the prefix, and no more counts as cached."""
    llm = shared_llm()
    reference = llm.generate(PROMPT, greedy(), native=True)
    right = following(reference)

    def script(seq, length):
        tokens = right(seq, length)
        kept = {"right": length, "right then wrong": 2, "wrong": 0}[draft]
        return [*tokens[:kept], *((t + 1) % llm.vocab for t in tokens[kept:])]

    tokens, native_kv = cached_kv(llm, llm.engine().kv, 13)
    with drafting(llm, script) as engine:
        drafted_tokens, kv = cached_kv(llm, engine.kv, 13)
    shared = min(len(tokens), len(drafted_tokens))
    assert shared > len(reference[0].prompt_token_ids) + 8
    assert drafted_tokens[:shared] == tokens[:shared]
    torch.testing.assert_close(kv[:, :, :shared], native_kv[:, :, :shared], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lengths", [[K], [1], [K, 0, 0, 2], [0] * 9 + [K]])
@pytest.mark.parametrize("draft", ["same", "near"])
def test_the_drafts_kv_is_what_the_draft_would_compute(draft, lengths):
    """After full accepts, rejections and native stretches alike."""
    llm = make_llm(draft)
    engine = llm.engine()
    engine.controller = Cycle(lengths)
    tokens, kv = cached_kv(llm, engine.drafter.kv, 14, draft=True)
    alone = make_llm(target=model_dir(draft))
    expected_tokens, expected_kv = cached_kv(alone, alone.engine().kv, 1, prompt=tokens)
    assert expected_tokens == tokens
    torch.testing.assert_close(kv, expected_kv, atol=1e-4, rtol=1e-4)


class Cycle(Fixed):
    """Lengths round after round."""

    shapes = ()

    def __init__(self, lengths):
        self.lengths = itertools.cycle(lengths)

    def plan(self, request_ids):
        return [TreeShape.chain(next(self.lengths)) for _ in request_ids]


def cached_kv(llm, kv, num_tokens, prompt=PROMPT, draft=False):
    """Tokens whose KV counts as cached once `num_tokens` are emitted, and that KV."""
    stream = llm.stream([prompt], greedy())
    next(stream)
    (seq,) = llm.engine().scheduler.running
    while seq.num_emitted < num_tokens or (draft and seq.draft_cached <= seq.num_prompt):
        next(stream)
    assert seq.cached == len(seq.tokens) - 1 >= seq.draft_cached
    cached = seq.draft_cached if draft else seq.cached
    slots = torch.tensor([block * 16 + i for block in seq.blocks for i in range(16)][:cached])
    found = kv.storage[:, :, slots.to(kv.storage.device)].clone()
    stream.close()
    return seq.tokens[:cached], found


# 3: max_tokens inside a block


@pytest.mark.parametrize("params", [greedy, seeded])
@pytest.mark.parametrize("draft", ["follow", "wrong", "same", "near"])
def test_max_tokens_is_exact_for_every_number_of_tokens(draft, params):
    llm = shared_llm() if draft in ("follow", "wrong") else shared_llm(draft)
    reference = llm.generate(PROMPT, params(max_tokens=2 * K + 2), native=True)
    tokens, right = reference[0].outputs[0].token_ids, following(reference)
    wrong = lambda seq, length: [(t + 1) % llm.vocab for t in right(seq, length)]  # noqa: E731
    for max_tokens in range(1, 2 * K + 3):
        if draft in ("follow", "wrong"):
            with drafting(llm, right if draft == "follow" else wrong):
                output = completion(llm, PROMPT, params(max_tokens=max_tokens, logprobs=0))
        else:
            output = completion(llm, PROMPT, params(max_tokens=max_tokens, logprobs=0))
        assert output.token_ids == tokens[:max_tokens]
        assert (output.finish_reason, output.stop_reason) == ("length", None)
        assert len(output.logprobs) == output.stats.emitted == max_tokens
        assert output.stats.accepted <= output.stats.drafted
        if draft != "wrong":  # a round's last token is the target's own, so no draft reaches max_tokens
            assert output.stats.drafted <= max_tokens + output.stats.rounds * K - output.stats.emitted_in_rounds
        if draft == "follow":
            assert output.stats.drafted == output.stats.accepted == max_tokens - 1 - output.stats.rounds


@pytest.mark.parametrize("length", range(1, K + 3))
def test_a_draft_never_runs_past_max_tokens(length):
    llm, asked = shared_llm(), []

    def script(seq, wanted):
        asked.append((seq.num_emitted, wanted))
        return [5] * wanted

    with drafting(llm, script, length):
        completion(llm, PROMPT, greedy(max_tokens=7))
    assert asked
    assert all(wanted == min(length, 7 - emitted - 1) for emitted, wanted in asked)


# 7: which tokens end the text


@pytest.fixture(scope="module")
def many_ends():
    """config.json names 5 and 6, generation_config.json 7, the tokenizer 2."""
    path = make_model_dir(root() / "many-ends", eos=[5, 6])
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7]}))
    return make_llm(target=path)


@pytest.mark.parametrize("eos", [2, 5, 6, 7])
@pytest.mark.parametrize("length", [0, K])
def test_any_end_of_sequence_id_ends_and_ignore_eos_disables_all(many_ends, eos, length):
    llm, prompt = many_ends, many_ends.tokenizer.encode(PROMPT)
    body = sentence(llm)
    spoken = [*body[:3], eos, *body[3:]]
    with forcing(llm, prompt, spoken, length):
        ended = completion(llm, PROMPT, greedy(max_tokens=len(spoken), ignore_eos=False))
        ignored = completion(llm, PROMPT, greedy(max_tokens=len(spoken)))
        stopped = completion(llm, PROMPT, greedy(max_tokens=len(spoken), stop_token_ids=[body[5]]))
        both = completion(llm, PROMPT, greedy(max_tokens=len(spoken), ignore_eos=False, stop_token_ids=[eos]))
    text = llm.tokenizer.decode(body[:3], continuation=True)
    assert shown(ended) == (text, tuple(spoken[:4]), "stop", None)
    assert (ignored.token_ids, ignored.finish_reason) == (tuple(spoken), "length")
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == (tuple(spoken[:7]), "stop", body[5])
    assert (both.token_ids, both.finish_reason, both.stop_reason) == (tuple(spoken[:4]), "stop", eos)


# 8: min_tokens


@pytest.mark.parametrize("draft", [None, "same", "near"])
@pytest.mark.parametrize("params", [greedy, seeded])
def test_min_tokens_counts_tokens_and_not_rounds(draft, params):
    """With an end that wins as soon as it may, it comes exactly then."""
    llm = shared_llm(draft)
    eager = {"logit_bias": {llm.tokenizer.eos_id: 1e4}, "ignore_eos": False}
    for min_tokens in range(2 * K + 3):
        output = completion(llm, PROMPT, params(min_tokens=min_tokens, **eager))
        assert len(output.token_ids) == min_tokens + 1
        assert (output.token_ids[-1], output.finish_reason) == (llm.tokenizer.eos_id, "stop")
        assert llm.tokenizer.eos_id not in output.token_ids[:-1]


@pytest.mark.parametrize("length", [0, 1, K])
def test_a_stop_string_before_min_tokens_does_not_end(length):
    llm = shared_llm()
    prompt, body = llm.tokenizer.encode(PROMPT), sentence(llm, 16)
    stop = llm.tokenizer.token_string(body[3]).replace("▁", " ")
    text = llm.tokenizer.decode(body, continuation=True)
    with forcing(llm, prompt, body, length):
        early = completion(llm, PROMPT, greedy(max_tokens=16, stop=stop))
        late = completion(llm, PROMPT, greedy(max_tokens=16, min_tokens=16, stop=stop))
    assert early.text == text[: text.index(stop)]
    assert len(late.token_ids) == 16
