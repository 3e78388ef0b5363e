"""Penalties, bias, bans, filters and temperatures act on every verified row as they act on native decoding."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from lychee.kernels.types import GREEDY_BELOW
from lychee.runtime.checks import ParameterError
from lychee.runtime.config import SpeculativeConfig
from lychee.runtime.drafter import ModelDrafter
from lychee.runtime.sampling_params import SamplingParams
from tests.factory import make_model_dir
from tests.runtime.pairs import (
    KINDS,
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

NEVER = float("-inf")
PENALTIES = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.2},
    "repetition": {"repetition_penalty": 1.5},
    "rewards": {"presence_penalty": -1.0, "frequency_penalty": -0.5, "repetition_penalty": 0.8},
    "all": {"presence_penalty": 0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
}


def reordered(right):
    """Drafts made of the tokens that come next, each of them too late: all are rejected, and none may count."""
    return lambda seq, length: right(seq, length)[1:]


# 8: penalties


@pytest.mark.parametrize("penalties", PENALTIES)
@pytest.mark.parametrize("params", [greedy, seeded])
def test_penalties_count_the_prefix_and_the_rows_own_path(penalties, params):
    given = params(**PENALTIES[penalties], max_tokens=32)
    llm = shared_llm()
    references = llm.generate(PROMPTS, given)
    expected = [shown(o.outputs[0]) for o in references]
    assert expected != [shown(o.outputs[0]) for o in llm.generate(PROMPTS, params(max_tokens=32))]
    for script in (following(references), reordered(following(references))):
        with drafting(llm, script):
            outputs = llm.generate(PROMPTS, given)
        assert [shown(o.outputs[0]) for o in outputs] == expected
    with drafting(llm, following(references)):
        stats = completion(llm, PROMPT, given).stats
    assert stats.accepted == stats.drafted > 16  # every chain whole, so every row of it saw its own path
    for draft in ("same", "near"):
        assert [shown(o.outputs[0]) for o in shared_llm(draft).generate(PROMPTS, given)] == expected


@pytest.mark.parametrize("length", [0, 1, K])
def test_presence_and_frequency_are_subtracted_by_hand(length):
    llm = shared_llm()
    given = greedy(presence_penalty=0.2, frequency_penalty=0.3, logprobs=llm.vocab, max_tokens=32)
    reference = llm.generate(PROMPT, given)
    with drafting(llm, following(reference), length):
        output = completion(llm, PROMPT, given)
    counts = Counter()
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        penalised = {t: value - 0.2 * (counts[t] > 0) - 0.3 * counts[t] for t, value in entry.top.items()}
        assert token == max(penalised, key=penalised.get)
        counts[token] += 1
    assert max(counts.values()) > 1


def test_a_request_with_penalties_does_not_touch_its_neighbours():
    llm = shared_llm("near")
    params = [greedy(), greedy(**PENALTIES["all"]), seeded(**PENALTIES["repetition"]), seeded()]
    together = llm.generate(PROMPTS, params)
    for prompt, given, output in zip(PROMPTS, params, together, strict=True):
        assert shown(output.outputs[0]) == shown(completion(llm, prompt, given, native=True))


# 9: bias, bans, bad words, min_p


@pytest.mark.parametrize("params", [greedy, seeded])
@pytest.mark.parametrize("draft", ["follow", "stubborn", "same", "near"])
def test_a_banned_token_never_appears(draft, params):
    llm = shared_llm() if draft in ("follow", "stubborn") else shared_llm(draft)
    unbanned = llm.generate(PROMPTS, params(), native=True)
    banned = {token for output in unbanned for token in output.outputs[0].token_ids}
    given = params(logit_bias=dict.fromkeys(banned, NEVER))
    reference = llm.generate(PROMPTS, given, native=True)
    if draft in ("follow", "stubborn"):  # a stubborn drafter goes on proposing what is banned
        with drafting(llm, following(reference if draft == "follow" else unbanned)):
            outputs = llm.generate(PROMPTS, given)
    else:
        outputs = llm.generate(PROMPTS, given)
    for output, expected in zip(outputs, reference, strict=True):
        assert banned.isdisjoint(output.outputs[0].token_ids)
        assert shown(output.outputs[0]) == shown(expected.outputs[0])
        assert (output.outputs[0].stats.accepted > 0) == (draft != "stubborn")


@pytest.mark.parametrize("verify", ["rejection", "coupled"])
def test_a_banned_token_never_appears_under_sampling_with_a_ratio_test(verify):
    llm = make_llm("near", config=SpeculativeConfig(num_speculative_tokens=K, verify=verify), max_num_seqs=128)
    allowed = (10, 20, 30, 40, 50)
    bias = {token: NEVER for token in range(llm.vocab) if token not in allowed}
    outputs = llm.generate(PROMPT, SamplingParams(n=64, max_tokens=20, seed=1, logit_bias=bias, ignore_eos=True))
    assert {token for o in outputs[0].outputs for token in o.token_ids} == set(allowed)
    assert sum(o.stats.accepted for o in outputs[0].outputs) > 0


@pytest.mark.parametrize("draft", [None, "same", "near"])
@pytest.mark.parametrize("params", [greedy, seeded])
def test_a_bias_reaches_every_token_of_a_path_and_the_bonus_token(draft, params):
    llm = shared_llm(draft)
    output = completion(llm, PROMPT, params(logit_bias={77: 100.0}))
    assert set(output.token_ids) == {77}
    small = params(logit_bias={77: 1.5, 207: -2.0, 3: 0.5})
    assert shown(completion(llm, PROMPT, small)) == shown(completion(llm, PROMPT, small, native=True))


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("word", ["lychees", "the", "over the", "hen"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_word_never_appears_though_model_and_drafter_insist_on_it(kind, word, spaced):
    llm = shared_llm(kind=kind)
    ids = llm.tokenizer.encode(("and " if spaced else "(") + word, add_bos=False)
    first = next(n for n in range(len(ids)) if word.endswith(llm.tokenizer.decode(ids[n:], continuation=True).strip()))
    tokens = tuple(ids[first:])
    assert llm.tokenizer.decode(tokens, continuation=True) == " " * spaced + word
    prompt, spoken = llm.tokenizer.encode(PROMPT), [*ids[:first], *tokens * 4]

    def says(output):
        return any(output.token_ids[i : i + len(tokens)] == tokens for i in range(len(output.token_ids)))

    for length in (0, 1, 2, K):
        with forcing(llm, prompt, spoken, length):
            free = completion(llm, PROMPT, greedy(max_tokens=len(spoken)))
            banned = completion(llm, PROMPT, greedy(max_tokens=len(spoken), bad_words=[word]))
        assert says(free)
        assert not says(banned)
        assert word not in banned.text
        kept = [i for i, (a, b) in enumerate(zip(free.token_ids, banned.token_ids, strict=True)) if a != b]
        assert kept == [first + len(tokens) * (i + 1) - 1 for i in range(4)]  # only the words' last tokens change


@pytest.mark.parametrize("params", [greedy, seeded])
@pytest.mark.parametrize("draft", ["same", "near"])
def test_bad_words_taken_from_the_output_itself_do_not_appear(draft, params):
    llm = shared_llm(draft, kind="bpe")
    reference = completion(llm, PROMPT, params(), native=True).token_ids
    pairs = [reference[i : i + 2] for i in range(0, len(reference) - 1, 2)]
    words = []
    for pair in pairs:
        text = llm.tokenizer.decode(pair)
        if tuple(llm.tokenizer.encode(text, add_bos=False)) == pair:
            words.append((text, pair))
    assert words
    given = params(bad_words=[text for text, _ in words])
    expected = completion(llm, PROMPT, given, native=True)
    output = completion(llm, PROMPT, given)
    assert shown(output) == shown(expected)
    assert output.token_ids != reference
    for _, pair in words:
        assert pair not in list(zip(output.token_ids, output.token_ids[1:], strict=False))


@pytest.mark.parametrize("draft", [None, "same", "near"])
def test_min_p_drops_what_is_too_unlikely_from_every_row(draft):
    llm = shared_llm(draft)
    given = seeded(min_p=0.3, temperature=1.5, max_tokens=40, logprobs=1)
    output = completion(llm, PROMPT, given)
    assert shown(output) == shown(completion(llm, PROMPT, given, native=True))
    assert output.token_ids != completion(llm, PROMPT, replace(given, min_p=0.0), native=True).token_ids
    for entry in output.logprobs:
        assert entry.logprob >= max(entry.top.values()) + 1.5 * math.log(0.3) - 1e-4


# 10: what the drafter drew from is what acceptance divides by


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.5}, {"temperature": 0.3}, PENALTIES["all"], {"logit_bias": {77: 5.0}}],
    ids=str,
)
def test_a_draft_equal_to_the_target_is_always_accepted_under_every_filter(filters):
    """Were one of the two distributions raw and the other processed, some ratios would be below 1."""
    config = SpeculativeConfig(num_speculative_tokens=K, verify="rejection")
    llm = make_llm("same", config=config)
    output = completion(llm, PROMPT, SamplingParams(**{"max_tokens": 60, "seed": 3, "ignore_eos": True} | filters))
    assert output.stats.accepted == output.stats.drafted > 30


def test_drafted_tokens_lie_in_the_distribution_kept_for_them(monkeypatch):
    llm = make_llm("near", config=SpeculativeConfig(num_speculative_tokens=K, verify="rejection"))
    kept, propose = [], ModelDrafter.propose

    def spy(self, batch, shapes, goes_on=None):
        kept.append(propose(self, batch, shapes, goes_on))
        return kept[-1]

    monkeypatch.setattr(ModelDrafter, "propose", spy)
    llm.generate(PROMPTS, SamplingParams(max_tokens=20, top_k=3, seed=1, ignore_eos=True))
    checked = 0
    for proposals in kept:
        if proposals.draft_log_probs is None:
            continue
        row = 0
        for tree in proposals.trees:
            for node in range(1, tree.shape.num_nodes):
                probs = proposals.draft_log_probs[row + tree.shape.parents[node]].exp()
                assert probs[tree.tokens[node]] > 0
                assert int((probs > 0).sum()) == 3
                assert math.isclose(float(probs.sum()), 1.0, abs_tol=1e-5)
                checked += 1
            row += tree.shape.num_nodes
    assert checked > 50


# 11: extreme temperatures and logits


@pytest.fixture(scope="module")
def loud():
    """T with logits up to about 60000: the largest in fp16 are near 65504."""
    path, source = make_model_dir(root() / "loud"), model_dir()
    weights = load_file(source / "model.safetensors")
    weights["model.norm.weight"] *= 8000
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("verify", ["rejection", "coupled"])
def test_huge_logits_and_tiny_temperatures_give_the_argmax_and_no_nan(loud, dtype, verify):
    config = SpeculativeConfig(num_speculative_tokens=K, verify=verify)
    llm = make_llm(loud, target=loud, config=config, dtype=dtype)
    reference = completion(llm, PROMPT, greedy(logprobs=llm.vocab), native=True)
    spans = [max(entry.top.values()) - min(entry.top.values()) for entry in reference.logprobs]
    assert max(spans) > 60000
    temperatures = (1.0, 1e-3, 1e-4, 2e-5, GREEDY_BELOW, 9e-6, 1e-9, 1e-12, 1e-300)
    given = [greedy(temperature=temperature, seed=5, logprobs=1) for temperature in temperatures]
    for native in (True, False):
        for output in llm.generate([PROMPT] * len(given), given, native=native):
            assert output.outputs[0].token_ids == reference.token_ids
            assert all(math.isfinite(entry.logprob) for entry in output.outputs[0].logprobs)


@pytest.mark.parametrize("temperature", [1e-12, 1e-6, 9.9e-6])
def test_below_the_epsilon_sampling_is_greedy(temperature):
    llm = shared_llm("near")
    given = SamplingParams(max_tokens=24, temperature=temperature, ignore_eos=True)
    assert given.greedy
    assert shown(completion(llm, PROMPT, given)) == shown(completion(llm, PROMPT, greedy(), native=True))


@pytest.mark.parametrize("temperature", [100.0, 1e6, 1e38, 1e39, 1e300])
@pytest.mark.parametrize("draft", [None, "same"])
def test_a_huge_temperature_draws_evenly_from_what_is_allowed(draft, temperature):
    llm = shared_llm(draft)
    bias = {token: NEVER for token in range(llm.vocab) if not 100 <= token < 140}
    output = completion(llm, PROMPT, seeded(temperature=temperature, logit_bias=bias, max_tokens=60))
    assert all(100 <= token < 140 for token in output.token_ids)
    assert len(set(output.token_ids)) > 20


@pytest.mark.parametrize("penalty", [0.01, 100.0])
def test_an_extreme_repetition_penalty_keeps_logits_finite(penalty):
    llm = shared_llm("same")
    given = greedy(repetition_penalty=penalty)
    assert shown(completion(llm, PROMPT, given)) == shown(completion(llm, PROMPT, given, native=True))
    with pytest.raises(ParameterError, match=r"repetition_penalty is 1e-38, must be a finite number of at least 0\.01"):
        greedy(repetition_penalty=1e-38)


# 12: filters beyond the vocabulary, off, and mixed


def test_filters_mixed_in_one_batch_act_on_their_own_request():
    given = [
        seeded(top_k=0), seeded(top_k=-1), seeded(top_k=5), seeded(top_k=384), seeded(top_k=385), seeded(top_k=10**12),
        seeded(top_p=0.5), seeded(top_p=1e-9), seeded(top_k=1), seeded(min_p=1.0), seeded(min_p=1e-300), greedy(),
        seeded(top_p=1e-300), seeded(top_k=7, top_p=0.7, min_p=0.1), greedy(top_k=3, top_p=0.1, min_p=0.9),
    ]  # fmt: skip
    llm = shared_llm("near")
    together = [shown(o.outputs[0]) for o in llm.generate([PROMPT] * len(given), given)]
    natively = [shown(o.outputs[0]) for o in llm.generate([PROMPT] * len(given), given, native=True)]
    alone = [shown(completion(llm, PROMPT, params)) for params in given]
    assert together == natively == alone
    off, best = together[0], together[11]
    assert together[1] == together[3] == together[4] == together[5] == together[10] == off
    assert together[7] == together[8] == together[9] == together[12] == together[14] == best
    assert off != best
    assert together[2] != together[6]
