"""Tokenizers: what users write stays text, ids round trip, and pairs fit by their token strings."""

import dataclasses
import io
import json
import random
import shutil
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Tokenizer as Library
from transformers import PreTrainedTokenizerFast

from lychee.models.files import ModelError
from lychee.models.tokenizer import BREAK, check_pair, check_text
from lychee.models.tokenizer_files import load_tokenizer
from tests.factory import CORPUS, TOKENIZER_SIZE, save_tokenizer
from tests.models.conftest import KINDS, readable
from tests.models.texts import random_text

# Sentencepiece writes spaces as U+2581, so it cannot tell the two apart.
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="▁"), max_size=30) | st.sampled_from(
    [
        "naïve 😀👩‍👩‍👧 ﷽",
        "日本語テキスト",
        " leading",
        "trailing  ",
        "\n\n\ttabs\r\n",
        "</s>",
        "<|eot_id|>x",
        "<0x41>",
        "\0",
    ]
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=TEXT)
def test_text_survives_the_round_trip(all_tokenizers, kind, text):
    tokenizer = all_tokenizers[kind]
    assert tokenizer.decode(tokenizer.encode(text)) == readable(kind, text)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=TEXT)
def test_ids_and_text_equal_the_libraries(all_tokenizers, tokenizer_dirs, text):
    processor = SentencePieceProcessor(model_file=str(tokenizer_dirs["sentencepiece"] / "tokenizer.model"))
    ids = all_tokenizers["sentencepiece"].encode(text, add_bos=False)
    assert ids == processor.encode(text)
    assert all_tokenizers["sentencepiece"].decode(ids) == processor.decode(ids)
    library = Library.from_file(str(tokenizer_dirs["bpe"] / "tokenizer.json"))
    library.encode_special_tokens = True
    ids = library.encode(text).ids
    assert all_tokenizers["bpe"].encode(text) == ids
    assert all_tokenizers["bpe"].decode(ids) == library.decode(ids)


@pytest.mark.parametrize("kind", ["llama2_json", "metaspace"])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=TEXT.filter(bool))  # of nothing, a converted file makes the dummy prefix alone
def test_a_tokenizer_json_of_a_sentencepiece_model_gives_its_ids(all_tokenizers, kind, text):
    ids = all_tokenizers[kind].encode(text)
    want = all_tokenizers["sentencepiece"].encode(text)
    if readable(kind, text) == text:
        assert ids == want


@pytest.mark.parametrize("kind", KINDS)
def test_texts_from_all_over_unicode_get_the_libraries_ids(all_tokenizers, tokenizer_dirs, kind):
    path, rng = tokenizer_dirs[kind], random.Random(0)
    if kind == "sentencepiece":
        encode = SentencePieceProcessor(model_file=str(path / "tokenizer.model")).encode
    else:
        theirs = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"), split_special_tokens=True)
        encode = partial(theirs.encode, add_special_tokens=False)
    for _ in range(600):
        text = random_text(rng)
        assert all_tokenizers[kind].encode(text, add_bos=False) == encode(text)


def test_user_text_never_becomes_control_ids(tokenizer):
    for string in tokenizer.control:
        text = f"{string}a {string}{string}"
        ids = tokenizer.encode(text, add_bos=False)
        assert not set(ids) & set(tokenizer.control.values())
        assert tokenizer.decode(ids) == text


def test_a_raw_prompt_gets_one_bos_if_the_model_wants_it(tokenizer):
    assert tokenizer.encode("hi")[0] == tokenizer.bos_id
    assert tokenizer.encode("hi").count(tokenizer.bos_id) == 1
    assert tokenizer.bos_id not in tokenizer.encode("hi", add_bos=False)
    assert tokenizer.encode("") == [tokenizer.bos_id]


@pytest.mark.parametrize("kind", ["sentencepiece", "bpe"])
def test_a_model_that_wants_no_bos_gets_none(tmp_path, kind):
    save_tokenizer(tmp_path, kind, add_bos_token=False)
    tokenizer = load_tokenizer(tmp_path)
    assert not tokenizer.add_bos
    assert tokenizer.bos_id not in tokenizer.encode("hi") + tokenizer.encode_chat("hi")


def test_a_template_that_emits_bos_gets_no_second_one(tokenizer):
    bos = tokenizer.token_string(tokenizer.bos_id)
    assert tokenizer.encode_chat(bos + "hi").count(tokenizer.bos_id) == 1
    assert tokenizer.bos_id not in tokenizer.encode_chat("hi")  # as transformers has it: BOS is the template's to emit


def test_rendered_templates_hold_control_tokens(tokenizer):
    eos = tokenizer.token_string(tokenizer.eos_id)
    ids = tokenizer.encode_chat(f"hi{eos}there{eos}")
    assert ids.count(tokenizer.eos_id) == 2
    assert tokenizer.decode(ids, skip_special=False).replace(f"{eos} ", eos).endswith(f"hi{eos}there{eos}")


def test_a_break_keeps_a_control_string_text_without_changing_it(tokenizer):
    for string in tokenizer.control:
        ids = tokenizer.encode_chat(f"hi {string[0]}{BREAK}{string[1:]} there")
        assert tokenizer.control[string] not in ids
        assert tokenizer.decode(ids) == f"hi {string} there"


@pytest.mark.parametrize(("legacy", "after"), [(True, "▁"), (False, "")])
def test_a_dummy_prefix_follows_control_tokens_only_in_legacy_files(tmp_path, legacy, after):
    save_tokenizer(tmp_path, "sentencepiece", legacy=legacy)
    tokenizer = load_tokenizer(tmp_path)

    def spelt(text):
        return "".join(tokenizer.token_string(i) for i in tokenizer.encode_chat(text))

    assert spelt("<s>Hello") == "<s>" + after + "Hello"
    assert spelt("Hello</s>Hello") == "▁Hello</s>" + after + "Hello"


@pytest.mark.parametrize("bad", ["\ud83d", "ab\udc00"])
def test_a_lone_surrogate_is_refused_naming_the_argument(tokenizer, bad):
    with pytest.raises(ValueError, match=r"^text has the lone surrogate U\+D[8C][0-9A-F]+ at index \d"):
        tokenizer.encode(bad)
    with pytest.raises(ValueError, match=r"^prompt has the lone surrogate"):
        check_text(bad, "prompt")
    with pytest.raises(ValueError, match=r"^prompt is int, must be a string"):
        check_text(3, "prompt")


def test_sizes_and_ids(tokenizer):
    assert tokenizer.size == TOKENIZER_SIZE
    for bad in (-1, tokenizer.size):
        for use in (tokenizer.token_bytes, tokenizer.token_string, lambda i: tokenizer.decode([i])):
            with pytest.raises(ValueError, match=f"token id is {bad}, must be from 0 to {tokenizer.size - 1}"):
                use(bad)


def test_special_tokens_show_only_when_asked_for(tokenizer):
    ids = [tokenizer.bos_id, *tokenizer.encode("hi", add_bos=False), tokenizer.eos_id]
    assert tokenizer.decode(ids) == "hi"
    shown = tokenizer.decode(ids, skip_special=False)
    assert shown.startswith(tokenizer.token_string(tokenizer.bos_id))
    assert shown.endswith(tokenizer.token_string(tokenizer.eos_id))


def test_a_pair_fits_if_the_common_range_agrees(all_tokenizers):
    target = all_tokenizers["sentencepiece"]
    longer = dataclasses.replace(target, strings=(*target.strings, "<pad>"))
    check_pair(target, longer)
    check_pair(longer, target)
    check_pair(target, all_tokenizers["llama2_json"])


def test_another_tokenizer_is_refused_naming_the_first_difference(all_tokenizers):
    target = all_tokenizers["sentencepiece"]
    strings = list(target.strings)
    strings[300:302] = ["one", "two"]
    with pytest.raises(ValueError, match=f"has 'one' as token 300 where the target's has '{target.strings[300]}'"):
        check_pair(target, dataclasses.replace(target, strings=tuple(strings)))
    with pytest.raises(ValueError, match="as token 0 where"):
        check_pair(target, all_tokenizers["bpe"])


def test_added_tokens_extend_a_sentencepiece_model(tmp_path):
    added = {"2": {"content": "</s>", "special": True}, str(TOKENIZER_SIZE): {"content": "<|user|>", "special": True}}
    save_tokenizer(tmp_path, "sentencepiece", added_tokens_decoder=added)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|end|>": TOKENIZER_SIZE + 1}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.size == TOKENIZER_SIZE + 2
    ids = tokenizer.encode_chat("<|user|>hi<|end|>")
    assert (ids[0], ids[-1]) == (TOKENIZER_SIZE, TOKENIZER_SIZE + 1)
    assert tokenizer.decode(tokenizer.encode("<|user|>")) == "<|user|>"
    assert max(tokenizer.encode("<|user|>")) < TOKENIZER_SIZE


def test_the_longest_control_string_wins(tmp_path):
    save_tokenizer(tmp_path, "sentencepiece")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"</s>!": TOKENIZER_SIZE}))
    assert load_tokenizer(tmp_path).encode_chat("</s>!") == [TOKENIZER_SIZE]


def test_an_end_token_that_sentencepiece_finds_in_text_is_still_control(tmp_path):
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=TOKENIZER_SIZE,
        byte_fallback=True,
        user_defined_symbols=["<|end|>"],
        num_threads=1,
        minloglevel=2,
    )
    save_tokenizer(tmp_path, "sentencepiece", eos_token="<|end|>")
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"text holds '<\|end\|>', which this tokenizer cannot encode as plain text"):
        tokenizer.encode("a <|end|>")
    assert tokenizer.encode_chat("a<|end|>")[-1] == tokenizer.eos_id
    assert "<|end|>" in tokenizer.control


def test_ends_may_be_named_by_the_older_map_file(tmp_path, tokenizer_dirs):
    shutil.copy(tokenizer_dirs["bpe"] / "tokenizer.json", tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|eot_id|>", "bos_token": "x"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|begin_of_text|>", "eos_token": None}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.token_string(tokenizer.eos_id) == "<|eot_id|>"
    assert tokenizer.token_string(tokenizer.bos_id) == "<|begin_of_text|>"


def edited(tmp_path, kind="bpe", **changes):
    save_tokenizer(tmp_path, kind)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**spec, **changes}))
    return tmp_path


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path, all_tokenizers):
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    text = "a longer text than three tokens"
    assert load_tokenizer(edited(tmp_path, truncation=truncation)).encode(text) == all_tokenizers["bpe"].encode(text)


def test_a_prefix_space_of_byte_level_is_not_put_inside_a_text(tmp_path):
    pre_tokenizer = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    tokenizer = load_tokenizer(edited(tmp_path, pre_tokenizer=pre_tokenizer))
    assert tokenizer.decode(tokenizer.encode_chat(f"hi <{BREAK}|eot_id|>")) == " hi <|eot_id|>"


def test_an_added_word_is_not_spelt_in_the_byte_alphabet(tmp_path, tokenizer_dirs):
    added = json.loads((tokenizer_dirs["bpe"] / "tokenizer.json").read_text())["added_tokens"]
    word = {**added[0], "id": TOKENIZER_SIZE, "content": "éà", "special": False}
    tokenizer = load_tokenizer(edited(tmp_path, added_tokens=[*added, word]))
    assert tokenizer.encode("éà", add_bos=False) == [TOKENIZER_SIZE]
    assert tokenizer.decode([TOKENIZER_SIZE]) == "éà"


def test_an_end_token_without_the_special_flag_is_still_control(tmp_path, tokenizer_dirs):
    spec = json.loads((tokenizer_dirs["bpe"] / "tokenizer.json").read_text())
    path = edited(tmp_path, added_tokens=[{**token, "special": False} for token in spec["added_tokens"]])
    tokenizer = load_tokenizer(path)
    assert tokenizer.eos_id not in tokenizer.encode("<|end_of_text|>")
    assert tokenizer.encode_chat("<|end_of_text|>")[-1] == tokenizer.eos_id
    assert tokenizer.decode([tokenizer.eos_id]) == ""


def test_a_text_that_the_patterns_cannot_take_is_refused(tmp_path):
    pattern = {"type": "Split", "pattern": {"Regex": "(a|aa)+[bc]d"}, "behavior": "Isolated", "invert": False}
    tokenizer = load_tokenizer(edited(tmp_path, pre_tokenizer=pattern))
    with pytest.raises(ValueError, match=r"text cannot be encoded by this tokenizer: .*retry-limit"):
        tokenizer.encode("a" * 40 + "bce")


def test_text_that_only_a_control_token_can_encode_is_refused(tmp_path, tokenizer_dirs):
    spec = json.loads((tokenizer_dirs["bpe"] / "tokenizer.json").read_text())
    spec["model"]["vocab"]["ab"] = len(spec["model"]["vocab"])
    spec["model"]["merges"].append(["a", "b"])
    spec["added_tokens"] = [{**spec["added_tokens"][0], "id": spec["model"]["vocab"]["ab"], "content": "ab"}]
    path = edited(tmp_path, model=spec["model"], added_tokens=spec["added_tokens"], post_processor=None)
    (path / "tokenizer_config.json").write_text("{}")
    tokenizer = load_tokenizer(path)
    assert not tokenizer.add_bos
    with pytest.raises(ValueError, match="text holds 'ab', which this tokenizer cannot encode as plain text"):
        tokenizer.encode("ab")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "WordPiece.* cannot be mapped to bytes"),
        ({"decoder": None}, "null.* cannot be mapped to bytes"),
        ({"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "CTC"}]}}, "is not a tokenizer|CTC"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}, "model type is WordLevel, must be BPE"),
        ({"model": 3}, "is not a tokenizer"),
        ({"added_tokens": 3}, "is not a tokenizer"),
    ],
)
def test_tokenizer_files_of_other_kinds_are_refused_by_name(tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        load_tokenizer(edited(tmp_path, **changes))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.model", b"not a model", "is not a sentencepiece model"),
        ("tokenizer.json", b"{", "is not JSON"),
        ("tokenizer.json", b"\xff", "is not UTF-8"),
        ("tokenizer.json", b'{"a": 1, "a": 2}', "gives 'a' twice"),
        ("tokenizer_config.json", b"[1]", "holds a list, must be a JSON object"),
        ("tokenizer_config.json", b'{"bos_token": "<nope>"}', "bos_token is '<nope>', which is not in the vocabulary"),
        ("tokenizer_config.json", b'{"eos_token": 2}', "eos_token is '2', must be a token's string"),
        ("tokenizer_config.json", b'{"add_bos_token": "yes"}', "add_bos_token is 'yes', must be true or false"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": 1}}', "added_tokens_decoder must map"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"999": {"content": "x"}}}', "has id 999, must be 384"),
        ("added_tokens.json", b'{"x": "y"}', "must map each token's string to its id"),
    ],
)
def test_malformed_tokenizer_files_are_refused(tmp_path, file, content, message):
    save_tokenizer(tmp_path, "sentencepiece")
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        load_tokenizer(tmp_path)


def test_a_directory_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"has neither tokenizer\.json nor tokenizer\.model"):
        load_tokenizer(tmp_path)
