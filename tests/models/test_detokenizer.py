"""Streaming: joined deltas are the full decode, characters arrive whole, the dummy prefix goes once."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lychee.models.detokenizer import Detokenizer
from tests.factory import TOKENIZER_SIZE
from tests.models.conftest import KINDS, readable

TEXTS = ["Hello world", "emoji 😀 and 👩‍👩‍👧!", "日本語と中文、한국어", "naïve Ωμέγα", " two  spaces", "a😀"]


def streamed(tokenizer, ids, **options):
    detokenizer = Detokenizer(tokenizer, **options)
    return [detokenizer.push(i) for i in ids], detokenizer.flush()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_characters_arrive_whole_wherever_the_output_is_cut(all_tokenizers, kind, text):
    tokenizer = all_tokenizers[kind]
    ids, text = tokenizer.encode(text, add_bos=False), readable(kind, text)
    for cut in range(len(ids) + 1):
        deltas, rest = streamed(tokenizer, ids[:cut])
        assert "\ufffd" not in "".join(deltas)
        assert text.startswith("".join(deltas))
        assert "".join(deltas) + rest == tokenizer.decode(ids[:cut])
    assert ("".join(deltas), rest) == (text, "")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    ids=st.lists(st.integers(0, TOKENIZER_SIZE - 1), max_size=12),
    continuation=st.booleans(),
    skip_special=st.booleans(),
)
def test_joined_deltas_are_the_full_decode_of_any_ids(all_tokenizers, kind, ids, continuation, skip_special):
    tokenizer = all_tokenizers[kind]
    deltas, rest = streamed(tokenizer, ids, continuation=continuation, skip_special=skip_special)
    assert "".join(deltas) + rest == tokenizer.decode(ids, skip_special, continuation)


def test_a_byte_that_cannot_continue_a_character_does_not_hold_up_the_next(tokenizer):
    first_of_four = tokenizer.encode("😀", add_bos=False)[-4]
    deltas, rest = streamed(tokenizer, [first_of_four, *tokenizer.encode("ok", add_bos=False)], continuation=True)
    assert "".join(deltas).replace(" ", "") == "\ufffdok"
    assert (deltas[0], rest) == ("", "")


def test_an_id_without_a_string_does_not_use_up_the_dummy_prefix(all_tokenizers):
    tokenizer = all_tokenizers["sentencepiece"]
    holed = dataclasses.replace(tokenizer, strings=(*tokenizer.strings, ""), pieces=(*tokenizer.pieces, b""))
    ids = [tokenizer.size, *tokenizer.encode("Hello")]
    assert "".join(streamed(holed, ids)[0]) == holed.decode(ids) == "Hello"


@pytest.mark.parametrize("kind", ["sentencepiece", "llama2_json", "metaspace"])
def test_the_dummy_prefix_is_stripped_once_and_never_on_continuation(all_tokenizers, kind):
    tokenizer = all_tokenizers[kind]
    ids = tokenizer.encode("Hello world")
    assert "".join(streamed(tokenizer, ids)[0]) == "Hello world"
    assert "".join(streamed(tokenizer, ids + ids)[0]) == "Hello world Hello world"
    assert "".join(streamed(tokenizer, ids, continuation=True)[0]) == " Hello world"


def test_generated_text_continues_its_prompt(tokenizer):
    ids = tokenizer.encode("Hello world, hello dog", add_bos=False)
    for cut in range(1, len(ids)):
        head = tokenizer.decode(ids[:cut])
        tail = "".join(streamed(tokenizer, ids[cut:], continuation=True)[0])
        assert head + tail == "Hello world, hello dog"
