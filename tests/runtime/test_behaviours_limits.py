"""Limits: context lengths of both models, vocabularies that differ, and bad input that leaves the engine serving."""

import json
import math
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from lychee.models.chat import ChatError
from lychee.runtime.checks import ParameterError
from lychee.runtime.llm import LLM
from lychee.runtime.sampling_params import SamplingParams
from tests.conftest import DEVICE
from tests.factory import TOKENIZER_SIZE, make_model_dir
from tests.runtime.pairs import (
    KINDS,
    PROMPT,
    PROMPTS,
    K,
    completion,
    drafting,
    following,
    greedy,
    make_llm,
    model_dir,
    root,
    seeded,
    shared_llm,
    shown,
)

LIMIT = 40
SURROGATE = "a \ud83d b"


# 13: bad input


def generating(*args, **kwargs):
    return lambda llm: llm.generate(*args, **kwargs)


BAD = [
    (generating(""), "prompt is ''"),
    (generating([PROMPT, ""]), "prompt is ''"),
    (generating([]), "prompts is []"),
    (generating([[]]), "prompt is []"),
    (generating([[5, 384]]), "prompt is"),
    (generating([[5, -1]]), "prompt is"),
    (generating([[5, 1.5]]), "prompt is"),
    (generating([[5, True]]), "prompt is"),
    (generating([None]), "prompt is None"),
    (generating(None), "prompts is None"),
    (generating(7.5), "prompts is 7.5"),
    (generating([7.5]), "prompt is 7.5"),
    (generating({"prompt": "a"}), "prompts is"),
    (generating(SURROGATE), "prompt: text has the lone surrogate U+D83D at index 2"),
    (generating([PROMPT, SURROGATE]), "prompt: text has the lone surrogate"),
    (generating([PROMPT, PROMPT], [SamplingParams()]), "params has 1 element for 2 prompts"),
    (generating(PROMPT, {"temperature": 0}), "params"),
    (generating([PROMPT], [{"temperature": 0}]), "params"),
    (generating(PROMPT, SamplingParams(stop_token_ids=[384])), "stop_token_ids is 384"),
    (generating(PROMPT, SamplingParams(logit_bias={999: 1.0})), "logit_bias id is 999"),
    (generating(PROMPT, SamplingParams(logit_bias=dict.fromkeys(range(384), -math.inf))), "logit_bias"),
    (generating([[5] * 256]), "prompt has 256 tokens"),
    (lambda llm: SamplingParams(max_tokens=0), "max_tokens is 0"),
    (lambda llm: SamplingParams(max_tokens=-5), "max_tokens is -5"),
    (lambda llm: SamplingParams(max_tokens=2.5), "max_tokens is 2.5"),
    (lambda llm: SamplingParams(max_tokens="8"), "max_tokens is '8'"),
    (lambda llm: SamplingParams(max_tokens=None), "max_tokens is None"),
    (lambda llm: SamplingParams(stop=SURROGATE), "stop has the lone surrogate"),
    (lambda llm: SamplingParams(stop=5), "stop is 5"),
    (lambda llm: SamplingParams(bad_words=[SURROGATE]), "bad_words has the lone surrogate"),
    (lambda llm: SamplingParams(stop_token_ids=7), "stop_token_ids is 7"),
    (lambda llm: SamplingParams(stop_token_ids="7"), "stop_token_ids is '7'"),
    (lambda llm: SamplingParams(logit_bias=[3]), "logit_bias is [3]"),
    (lambda llm: SamplingParams(logit_bias={3: None}), "logit_bias value is None"),
    (lambda llm: SamplingParams(min_tokens=17), "min_tokens is 17"),
    (lambda llm: SamplingParams(top_p=0), "top_p is 0"),
    (lambda llm: llm.chat([]), "messages"),
    (lambda llm: llm.chat([{"role": "user", "content": SURROGATE}]), "messages[0].content has the lone surrogate"),
    (lambda llm: llm.chat([{"role": "king", "content": "a"}]), "messages[0].role is 'king'"),
]


@pytest.mark.parametrize(("ask", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_refused_by_name_and_the_engine_goes_on_serving(ask, message):
    llm = shared_llm("near")
    expected = shown(completion(llm, PROMPT, greedy(max_tokens=4), native=True))
    stream = llm.stream("a b", greedy(max_tokens=12))
    next(stream)
    with pytest.raises((ParameterError, ChatError)) as caught:
        ask(llm)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert shown(completion(llm, PROMPT, greedy(max_tokens=4))) == expected
    assert len([*stream]) > 0  # a request that was running still ends
    assert len(stream.outputs()[0].outputs[0].token_ids) == 12
    pool = llm.engine().scheduler.pool
    assert pool.num_free == pool.num_blocks


def test_numpy_token_ids_are_token_ids():
    llm = shared_llm()
    expected = shown(completion(llm, [5, 6, 7], greedy(max_tokens=3)))
    for prompts in (np.array([5, 6, 7]), [np.array([5, 6, 7])], (5, 6, 7), [range(5, 8)]):
        assert shown(llm.generate(prompts, greedy(max_tokens=3))[0].outputs[0]) == expected


@pytest.mark.parametrize("huge", [2**31, 2**63, 10**30])
def test_huge_counts_are_clamped(huge):
    llm = shared_llm("same")
    output = completion(llm, [5] * 240, greedy(max_tokens=huge, min_tokens=huge, ignore_eos=False))
    assert len(output.token_ids) == 256 - 240


# 14: context limits


@pytest.fixture(scope="module")
def short_context():
    return make_model_dir(root() / "short-target", max_position=LIMIT)


@pytest.mark.parametrize("draft", [None, "follow", "same", "near"])
@pytest.mark.parametrize("params", [greedy, seeded])
def test_the_context_limit_is_exact_one_under_at_and_over(short_context, draft, params):
    """Also with prompts that leave room for one token, and for fewer than a round drafts."""
    long = make_llm()
    llm = make_llm(None if draft in (None, "follow") else draft, target=short_context)
    for prompt_len in (1, LIMIT // 2, LIMIT - K - 2, LIMIT - K - 1, LIMIT - K, LIMIT - 2, LIMIT - 1):
        prompt, room = [5 + i % 7 for i in range(prompt_len)], LIMIT - prompt_len
        reference = long.generate([prompt], params(max_tokens=room + 1))
        tokens = reference[0].outputs[0].token_ids
        for max_tokens in {max(room - 1, 1), room, room + 1, room + 100}:
            if draft == "follow":
                with drafting(llm, following(reference)):
                    output = completion(llm, prompt, params(max_tokens=max_tokens))
            else:
                output = completion(llm, prompt, params(max_tokens=max_tokens))
            assert output.token_ids == tokens[: min(room, max_tokens)]
            assert output.finish_reason == "length"
    with pytest.raises(ParameterError, match=f"prompt has {LIMIT} tokens, must leave room below max_model_len={LIMIT}"):
        llm.generate([[5] * LIMIT], params(max_tokens=1))


@pytest.mark.parametrize("max_model_len", [2, 17, 32, 255, 256])
def test_max_model_len_limits_prompt_and_output_together(max_model_len):
    llm = make_llm("same", max_model_len=max_model_len)
    for prompt_len in {1, max_model_len // 2, max_model_len - 1}:
        output = completion(llm, [7] * prompt_len, greedy(max_tokens=1000))
        assert len(output.token_ids) == max_model_len - prompt_len
        assert output.finish_reason == "length"


def test_a_max_model_len_beyond_the_model_is_refused():
    with pytest.raises(ParameterError, match="max_model_len is 257, must be at most the model's 256"):
        make_llm(max_model_len=257)


@pytest.mark.parametrize("params", [greedy, seeded])
@pytest.mark.parametrize("draft_limit", [1, 12, 24, 25, 26, 27, 28, 40])
def test_past_the_drafts_context_decoding_goes_on_without_it(draft_limit, params):
    path = make_model_dir(
        root() / f"short-draft-{draft_limit}", noise_of=model_dir(), noise=0.0, max_position=draft_limit
    )
    llm = make_llm(path)
    prompt, lengths = [5 + i % 7 for i in range(18)], []
    drafter = llm.engine().drafter
    propose = drafter.propose

    def spy(batch, shapes, goes_on=None):
        lengths.extend((seq.cached, shape.num_nodes - 1) for seq, shape in zip(batch.seqs, shapes, strict=True))
        return propose(batch, shapes, goes_on)

    drafter.propose = spy
    output = completion(llm, prompt, params(max_tokens=40))
    assert shown(output) == shown(completion(llm, prompt, params(max_tokens=40), native=True))
    assert all(length == max(0, min(K, draft_limit - cached, 56 - cached)) for cached, length in lengths)
    assert output.stats.accepted == output.stats.drafted
    assert (output.stats.drafted > 0) == (draft_limit > 18)
    mixed = llm.generate([prompt, [9, 10, 11]], params(max_tokens=40))  # one past the draft's limit, one below
    assert shown(mixed[0].outputs[0]) == shown(output)


# 15: vocabularies


@pytest.fixture(scope="module")
def padded():
    """Target and draft padded to different sizes, with padding that would win every draw were it not masked."""
    made = {}
    for name, vocab, source in (("target", 400, None), ("draft", 448, "target"), ("near", 448, "target")):
        path = root() / f"padded-{name}"
        noise = 0.05 if name == "near" else 0.0
        make_model_dir(path, vocab=vocab, noise_of=made.get(source), noise=noise)
        weights = load_file(path / "model.safetensors")
        embed = weights["model.embed_tokens.weight"]
        if source is None:
            embed[TOKENIZER_SIZE:] *= 20
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        made[name] = path
    return made


@pytest.mark.parametrize("draft", ["draft", "near"])
@pytest.mark.parametrize("params", [greedy, seeded, SamplingParams])
def test_padding_of_either_vocabulary_never_appears(padded, draft, params):
    llm = make_llm(padded[draft], target=padded["target"])
    assert (llm.target.config.vocab_size, llm.draft.config.vocab_size, llm.vocab) == (400, 448, TOKENIZER_SIZE)
    unmasked = make_llm(target=padded["target"])
    unmasked.vocab = 400
    unmasked.engine().vocab = 400
    given = params(max_tokens=40, logprobs=5)
    with pytest.raises(ValueError, match="token id is"):  # the padding would win
        unmasked.generate(PROMPTS, given)
    outputs = llm.generate(PROMPTS, given)
    for output in outputs:
        assert all(token < TOKENIZER_SIZE for token in output.outputs[0].token_ids)
        assert all(token < TOKENIZER_SIZE for entry in output.outputs[0].logprobs for token in entry.top)
    assert sum(o.outputs[0].stats.accepted for o in outputs) > 0
    if params is not SamplingParams:
        natively = llm.generate(PROMPTS, given, native=True)
        assert [shown(o.outputs[0]) for o in outputs] == [shown(o.outputs[0]) for o in natively]


def test_a_padding_id_in_a_prompt_is_refused(padded):
    llm = make_llm(target=padded["target"])
    with pytest.raises(ParameterError, match=r"prompt is \[5, 384\], must be text, or token ids in 0\.\.383"):
        llm.generate([[5, 384]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_with_another_tokenizer_is_refused_naming_the_first_differing_token(kind):
    other = KINDS[1 - KINDS.index(kind)]
    with pytest.raises(ParameterError) as caught:
        make_llm(model_dir("T", other), kind=kind)
    ours, theirs = shared_llm(kind=kind).tokenizer.strings, shared_llm(kind=other).tokenizer.strings
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    assert f"draft tokenizer has {theirs[at]!r} as token {at} where the target's has {ours[at]!r}" in str(caught.value)


@pytest.mark.parametrize("at", [3, 200, 377])
def test_two_swapped_tokens_make_another_tokenizer(at):
    """Same size, same strings, and text would come out wrong."""
    path = root() / f"swapped-{at}"
    shutil.copytree(model_dir("T", "bpe"), path, dirs_exist_ok=True)
    spec = json.loads((path / "tokenizer.json").read_text())
    vocab = spec["model"]["vocab"]
    by_id = {i: string for string, i in vocab.items()}
    vocab[by_id[at]], vocab[by_id[at + 1]] = at + 1, at
    (path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ParameterError) as caught:
        make_llm(path, kind="bpe")
    assert f"has {by_id[at + 1]!r} as token {at} where the target's has {by_id[at]!r}" in str(caught.value)


def test_a_draft_vocabulary_below_the_tokenizer_is_refused():
    path = make_model_dir(root() / "small-draft", vocab=380, tokenizer=None)
    shutil.copy(model_dir() / "tokenizer.model", path)
    with pytest.raises(ParameterError, match="draft_model has vocab_size 380, must hold the target's 384 tokens"):
        LLM(model_dir(), path, device=DEVICE)


def test_a_tokenizer_larger_than_the_model_cannot_make_it_read_past_its_table():
    path = make_model_dir(root() / "small-target", vocab=330, tokenizer=None)
    shutil.copy(model_dir() / "tokenizer.model", path)
    llm = make_llm(target=path)
    high = next(char for char in "日本語中文你好" if llm.tokenizer.encode(char, add_bos=False)[-1] >= 330)
    with pytest.raises(ParameterError, match="prompt"):
        llm.generate(high)
    output = completion(llm, [5, 6], greedy(max_tokens=20, bad_words=[high]))
    assert all(token < 330 for token in output.token_ids)
