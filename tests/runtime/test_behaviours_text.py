"""Text: stop strings, unfinished characters, spaces and BOS, streamed as they are generated."""

import random

import pytest

from lychee.models.tokenizer_files import load_tokenizer
from tests.factory import make_model_dir, save_tokenizer
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
    streamed,
)

LENGTHS = (0, 1, 3, K, 7)
SENTENCE = " the 日本語 dog 😀 says: hello hello!"


def spoken(llm, text=SENTENCE):
    """Ids that continue a prompt with exactly this text."""
    ids = llm.tokenizer.encoder.marked(text, False)
    assert llm.tokenizer.decode(ids, continuation=True) == text
    return ids


# 2: stop strings


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_cut_at_every_offset_of_the_text(kind, length):
    """One request per offset and length of the stop, all in a batch; the target says the sentence to each."""
    llm = shared_llm(kind=kind)
    ids = spoken(llm)
    stops = list({SENTENCE[at : at + n] for at in range(len(SENTENCE)) for n in (1, 2, 3, 5, 9)})
    given = [greedy(max_tokens=len(ids), stop=stop) for stop in stops]
    with forcing(llm, llm.tokenizer.encode(PROMPT), ids, length):
        deltas, outputs = streamed(llm, [PROMPT] * len(stops), given)
        whole = llm.generate([PROMPT] * len(stops), given)
    for stop, parts, output, again in zip(stops, deltas, outputs, whole, strict=True):
        completed = output.outputs[0]
        assert "".join(parts) == completed.text == again.outputs[0].text == SENTENCE[: SENTENCE.index(stop)]
        assert (completed.finish_reason, completed.stop_reason) == ("stop", stop)
        assert completed.token_ids == again.outputs[0].token_ids == tuple(ids[: tokens_until(llm, ids, stop)])


def tokens_until(llm, ids, stop):
    """How many tokens it takes to complete the stop."""
    return next(n for n in range(1, len(ids) + 1) if stop in llm.tokenizer.decode(ids[:n], continuation=True))


@pytest.mark.parametrize("params", [greedy, seeded])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft", ["follow", "same", "near"])
def test_stop_strings_cut_at_every_offset_of_what_a_model_says(draft, kind, params):
    """Native, speculative, streamed: the same text, the reference's up to the stop."""
    llm = shared_llm(kind=kind) if draft == "follow" else shared_llm(draft, kind=kind)
    reference = llm.generate(PROMPT, params(), native=True)
    text = reference[0].outputs[0].text
    stops = list(dict.fromkeys(text[at : at + n] for at in range(len(text) - 3) for n in (1, 3)))[:48]
    given = [params(stop=stop) for stop in stops]
    native = llm.generate([PROMPT] * len(stops), given, native=True)
    if draft == "follow":
        with drafting(llm, following(reference)):
            deltas, outputs = streamed(llm, [PROMPT] * len(stops), given)
    else:
        deltas, outputs = streamed(llm, [PROMPT] * len(stops), given)
    for stop, parts, output, expected in zip(stops, deltas, outputs, native, strict=True):
        assert "".join(parts) == output.outputs[0].text == expected.outputs[0].text == text[: text.index(stop)]
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_start_of_a_stop_string_that_never_comes_is_shown(kind, length):
    llm = shared_llm(kind=kind)
    ids = spoken(llm)
    stops = ("hello hello?", "dog 😀 sings", "!?", SENTENCE + " again", "日本人")
    given = [greedy(max_tokens=n, stop=stop) for stop in stops for n in range(1, len(ids) + 1)]
    with forcing(llm, llm.tokenizer.encode(PROMPT), ids, length):
        deltas, outputs = streamed(llm, [PROMPT] * len(given), given)
    for params, parts, output in zip(given, deltas, outputs, strict=True):
        expected = llm.tokenizer.decode(ids[: params.max_tokens], continuation=True)
        assert "".join(parts) == output.outputs[0].text == expected
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_start_of_a_stop_string_before_the_end_of_sequence_is_shown(kind, length):
    llm = shared_llm(kind=kind)
    ids = [*spoken(llm, " say hel"), llm.tokenizer.eos_id, 5, 6, 7]
    with forcing(llm, llm.tokenizer.encode(PROMPT), ids, length):
        given = greedy(max_tokens=len(ids), stop="hello", ignore_eos=False)
        deltas, outputs = streamed(llm, [PROMPT], given)
    assert "".join(deltas[0]) == outputs[0].outputs[0].text == " say hel"


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("stops", "kept", "reason"),
    [
        (["hello!", "hello"], "", "hello"), (["o", "ell"], "h", "ell"), (["hello", "hello h"], "", "hello"),
        (["lo h", "o hello!"], "hel", "lo h"), (["!", " hello"], "hello", " hello"), (["zz", "o h"], "hell", "o h"),
    ],
)  # fmt: skip
def test_of_several_stop_strings_the_one_that_completes_first_ends(stops, kept, reason, length):
    """A longer one that began earlier does not wait, nor does speculation change which comes first."""
    llm = shared_llm()
    ids = [i for char in "hello hello!" for i in llm.tokenizer.encoder.marked(char, False)]
    with forcing(llm, llm.tokenizer.encode(PROMPT), ids, length):
        output = completion(llm, PROMPT, greedy(max_tokens=len(ids), stop=stops))
        kept_in = completion(llm, PROMPT, greedy(max_tokens=len(ids), stop=stops, include_stop_str_in_output=True))
    assert (output.text, output.stop_reason) == (kept, reason)
    assert kept_in.text == kept + reason


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_of_stop_strings_that_one_token_completes_the_earliest_in_the_text_ends(kind, length):
    llm = shared_llm(kind=kind)
    (word,) = spoken(llm, " lychees")
    ids = [*spoken(llm, " a"), word, *spoken(llm, " b")]
    for stops in (["ees", "ych", "hee"], ["ych", "ees"], ["s", " ly", "a l"]):
        with forcing(llm, llm.tokenizer.encode(PROMPT), ids, length):
            output = completion(llm, PROMPT, greedy(max_tokens=len(ids), stop=stops))
        first = min(stops, key=" a lychees".index)
        assert (output.text, output.stop_reason) == (" a lychees".split(first)[0], first)


# 4: characters of several tokens


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("text", ["a😀b", "日本語と中文、한국어", "👩‍👩‍👧!", "größer 🍈 niño", "𝔘𝔫𝔦"])
@pytest.mark.parametrize("kind", KINDS)
def test_characters_arrive_whole_wherever_max_tokens_cuts_them(kind, text, length):
    llm = shared_llm(kind=kind)
    ids = spoken(llm, text)
    assert any("\ufffd" in llm.tokenizer.decode(ids[:n]) for n in range(len(ids)))
    for max_tokens in range(1, len(ids) + 1):
        with forcing(llm, llm.tokenizer.encode(PROMPT), ids, length):
            deltas, outputs = streamed(llm, [PROMPT], greedy(max_tokens=max_tokens))
        parts, output = deltas[0], outputs[0].outputs[0]
        assert "".join(parts) == output.text == llm.tokenizer.decode(ids[:max_tokens], continuation=True)
        assert all("\ufffd" not in part for part in parts[:-1])
        assert text.startswith("".join(parts).rstrip("\ufffd"))
        assert ("\ufffd" in parts[-1]) == (not text.startswith(output.text))
    assert output.text == text


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_end_of_sequence_inside_a_character_flushes_it(kind, length):
    llm = shared_llm(kind=kind)
    ids = [*spoken(llm, "ok 😀")[:-1], llm.tokenizer.eos_id, 9, 9, 9]
    with forcing(llm, llm.tokenizer.encode(PROMPT), ids, length):
        deltas, outputs = streamed(llm, [PROMPT], greedy(max_tokens=len(ids), ignore_eos=False))
    assert "".join(deltas[0]) == outputs[0].outputs[0].text == "ok \ufffd"


@pytest.mark.parametrize("kind", KINDS)
def test_joined_deltas_are_the_full_decode_of_any_tokens(kind):
    """Random ids: broken characters, special tokens and all."""
    llm, draws = shared_llm(kind=kind), random.Random(0)
    for _ in range(30):
        ids = [draws.randrange(llm.vocab) for _ in range(20)]
        with forcing(llm, llm.tokenizer.encode(PROMPT), ids, draws.randrange(6)):
            for skip in (True, False):
                deltas, outputs = streamed(llm, [PROMPT], greedy(max_tokens=20, skip_special_tokens=skip))
                expected = llm.tokenizer.decode(ids, skip_special=skip, continuation=True)
                assert "".join(deltas[0]) == outputs[0].outputs[0].text == expected


# 5: spaces


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_streamed_words_keep_the_spaces_between_them(kind, length):
    llm = shared_llm(kind=kind)
    for text in (" hello world", "hello world", "  two  spaces ", " a\n b"):
        ids = spoken(llm, text)
        with forcing(llm, llm.tokenizer.encode(PROMPT), ids, length):
            deltas, outputs = streamed(llm, [PROMPT], greedy(max_tokens=len(ids)))
        assert "".join(deltas[0]) == outputs[0].outputs[0].text == text


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_dummy_prefix_is_stripped_once_and_only_where_nothing_precedes(kind, length):
    llm = shared_llm(kind=kind)
    ids = llm.tokenizer.encode("hello world", add_bos=False)
    start = [llm.tokenizer.bos_id]
    with forcing(llm, start, ids + ids, length):
        deltas, outputs = streamed(llm, [start], greedy(max_tokens=2 * len(ids)))
    repeated = "hello world hello world" if kind == "sentencepiece" else "hello worldhello world"
    assert "".join(deltas[0]) == outputs[0].outputs[0].text == repeated
    with forcing(llm, llm.tokenizer.encode(PROMPT), ids, length):
        continued = completion(llm, PROMPT, greedy(max_tokens=len(ids)))
    assert continued.text == (" hello world" if kind == "sentencepiece" else "hello world")


# 6: one BOS


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_gets_one_bos_and_a_conversation_the_one_its_template_emits(kind):
    messages = [{"role": "user", "content": PROMPT}]
    silent = make_model_dir(root() / f"{kind}-silent", tokenizer=kind)
    save_tokenizer(silent, kind, chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for llm, emitted in ((shared_llm(kind=kind), 1), (make_llm(target=silent), 0)):
        ids = llm.encode_chat(messages)
        assert ids.count(llm.tokenizer.bos_id) == ids[:1].count(llm.tokenizer.bos_id) == emitted
        output = llm.chat(messages, greedy(max_tokens=3))
        assert list(output.prompt_token_ids) == ids
        raw = llm.generate(PROMPT, greedy(max_tokens=1))[0].prompt_token_ids
        assert raw[0] == llm.tokenizer.bos_id
        assert raw.count(llm.tokenizer.bos_id) == 1


def test_a_model_that_wants_no_bos_gets_none():
    path = make_model_dir(root() / "no-bos")
    save_tokenizer(path, "sentencepiece", add_bos_token=False)
    llm = make_llm(target=path)
    assert llm.tokenizer.bos_id not in llm.generate(PROMPT, greedy(max_tokens=1))[0].prompt_token_ids


def test_a_prompt_of_token_ids_is_taken_as_it_is():
    llm = shared_llm()
    for ids in ([5, 6, 7], [1, 5, 6], [1, 1, 5]):
        assert llm.generate([ids], greedy(max_tokens=1))[0].prompt_token_ids == tuple(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_control_strings_in_a_prompt_are_text(kind):
    llm = shared_llm(kind=kind)
    tokenizer = load_tokenizer(model_dir("T", kind))
    end = tokenizer.token_string(tokenizer.eos_id)
    (output,) = llm.generate([f"say {end} twice"], greedy(max_tokens=1))
    assert tokenizer.eos_id not in output.prompt_token_ids
    assert len(llm.generate(PROMPTS, greedy(max_tokens=1))) == len(PROMPTS)
