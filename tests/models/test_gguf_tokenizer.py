"""GGUF tokenizers: the ids that the tokenizer's own file gives, on texts from all over Unicode."""

import json
import random
import unicodedata

import pytest
import tokenizers
from sentencepiece import SentencePieceProcessor
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from lychee.models.chat import ChatTemplate
from lychee.models.files import ModelError
from lychee.models.gguf_file import GGUFFile
from lychee.models.gguf_tokenizer import gguf_tokenizer
from lychee.models.pre_tokenizers import GPT2, LLAMA3, PRE_TOKENIZERS, QWEN2
from lychee.models.tokenizer import BREAK
from lychee.models.tokenizer_files import load_tokenizer
from tests.factory import CHAT_TEMPLATE, CONTROL, TOKENIZER_SIZE, bpe_json, save_tokenizer, sentencepiece_model
from tests.models.gguf_factory import bpe_metadata, tokenizer_metadata, write
from tests.models.texts import random_text

COUNT = 400
K = "tokenizer.ggml."


def texts(seed, count=COUNT):
    rng = random.Random(seed)
    return [random_text(rng) for _ in range(count)]


def made(tmp_path, metadata):
    return gguf_tokenizer(GGUFFile.open(write(tmp_path / "m.gguf", "llama", metadata, {})))


def from_directory(tmp_path, kind, **config):
    save_tokenizer(tmp_path / kind, kind, **config)
    return load_tokenizer(tmp_path / kind)


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
def test_it_is_the_tokenizer_of_the_model_directory(tmp_path, kind):
    ours, theirs = made(tmp_path, tokenizer_metadata(kind)), from_directory(tmp_path, kind)
    for name in ("strings", "pieces", "control", "special_ids", "bos_id", "eos_id", "add_bos", "strips_prefix"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for text in texts(0):
        assert ours.encode(text) == theirs.encode(text)
        broken = f"{text}{CONTROL[2][0]}{BREAK}{CONTROL[2][1:]} </s>"
        assert ours.encode_chat(broken) == theirs.encode_chat(broken)
        ids = ours.encode(text, add_bos=False)
        assert ours.decode(ids) == theirs.decode(ids)


def test_sentencepiece_gives_the_same_ids(tmp_path):
    tokenizer = made(tmp_path, tokenizer_metadata("sentencepiece"))
    processor = SentencePieceProcessor(model_proto=sentencepiece_model())
    for text in texts(1):
        assert tokenizer.encode(text, add_bos=False) == processor.encode(text)


def whole_library(metadata, pre_tokenizer, whole_words=False, composed=False):
    """The vocabulary under a pre-tokenizer as the model's own tokenizer.json has it."""
    strings = metadata[K + "tokens"]
    vocab = {string: i for i, string in enumerate(strings)}
    merges = [tuple(merge.split(" ")) for merge in metadata[K + "merges"]]
    library = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=whole_words))
    library.pre_tokenizer, library.decoder = pre_tokenizer, decoders.ByteLevel()
    if composed:
        library.normalizer = normalizers.NFC()
    return library


def split(*patterns):
    """As Llama 3 and Qwen 2 have it."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PUBLISHED = {  # the pre_tokenizer sections of the models' own files
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), False, False),
    "smollm": (
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        False,
        False,
    ),
    "llama-bpe": (split(LLAMA3), True, False),
    "qwen2": (split(QWEN2), False, True),
    "default": (split(r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"), False, False),
}


@pytest.mark.parametrize("pre", PUBLISHED)
def test_pre_tokenizers_are_those_of_the_models_own_files(tmp_path, pre):
    metadata = bpe_metadata(json.loads(bpe_json()), pre)
    library, tokenizer = whole_library(metadata, *PUBLISHED[pre]), made(tmp_path, metadata)
    assert tokenizer.add_bos == PRE_TOKENIZERS[pre].add_bos == (pre == "llama-bpe")
    for text in texts(2, 2 * COUNT):
        ids = tokenizer.encode(text, add_bos=False)
        assert ids == library.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == (unicodedata.normalize("NFC", text) if pre == "qwen2" else text)


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
def test_user_text_never_becomes_control_tokens(tmp_path, kind):
    metadata = tokenizer_metadata(kind)
    metadata[K + "tokens"] = [*metadata[K + "tokens"], "<|im_start|>", "<tool>"]
    metadata[K + "token_type"] = [*metadata[K + "token_type"], 4, 4]  # one only looks user-defined
    if kind == "sentencepiece":
        metadata[K + "scores"] = [*metadata[K + "scores"], 0.0, 0.0]
    tokenizer = made(tmp_path, metadata)
    assert "<|im_start|>" in tokenizer.control
    for string in tokenizer.control:
        ids = tokenizer.encode(f"a{string} {string}", add_bos=False)
        assert not set(ids) & set(tokenizer.control.values())
        assert tokenizer.decode(ids) == f"a{string} {string}"
        assert tokenizer.control[string] in tokenizer.encode_chat(f"a{string}b")
    assert TOKENIZER_SIZE + 1 in tokenizer.encode("a <tool> b")
    assert tokenizer.decode(tokenizer.encode("a <tool> b")) == "a <tool> b"


def test_ends_are_control_tokens_whatever_their_type(tmp_path):
    metadata = tokenizer_metadata("bpe")
    metadata[K + "token_type"] = [1] * TOKENIZER_SIZE
    metadata[K + "eot_token_id"] = TOKENIZER_SIZE - 3
    tokenizer = made(tmp_path, metadata)
    assert set(tokenizer.control) == set(CONTROL[:3])
    assert tokenizer.eos_id not in tokenizer.encode(CONTROL[1])


@pytest.mark.parametrize("kind", [2, 4, 5])
def test_padding_at_the_end_is_no_part_of_the_vocabulary(tmp_path, kind):
    metadata = tokenizer_metadata("bpe")
    metadata[K + "tokens"] = [*metadata[K + "tokens"], "[PAD384]", "[PAD385]"]
    metadata[K + "token_type"] = [*metadata[K + "token_type"], kind, kind]
    assert made(tmp_path, metadata).size == TOKENIZER_SIZE


@pytest.mark.parametrize(
    ("kind", "given", "want"),
    [("bpe", None, True), ("bpe", False, False), ("sentencepiece", None, True), ("sentencepiece", False, False)],
)
def test_whether_a_bos_is_added(tmp_path, kind, given, want):
    assert made(tmp_path, {**tokenizer_metadata(kind), K + "add_bos_token": given}).add_bos == want


def test_a_model_without_dummy_prefix(tmp_path):
    tokenizer = made(tmp_path, {**tokenizer_metadata("sentencepiece"), K + "add_space_prefix": False})
    assert not tokenizer.strips_prefix
    for text in ("hello", " hello", "</s>x"):
        assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text


def test_a_merge_of_a_space_is_cut_at_its_second_one(tmp_path):
    """As llama.cpp does; in byte-level BPE a space is Ġ, so such a token cannot come of a text."""
    metadata = tokenizer_metadata("bpe")
    metadata[K + "tokens"] = [*metadata[K + "tokens"], " ", " t"]
    metadata[K + "token_type"] = [*metadata[K + "token_type"], 1, 1]
    metadata[K + "merges"] = [*metadata[K + "merges"], "  t"]
    assert made(tmp_path, metadata).size == TOKENIZER_SIZE + 2


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("bpe", {"model": "bert"}, "tokenizer.ggml.model is bert, must be gpt2 or llama"),
        ("bpe", {"model": None}, "tokenizer.ggml.model is None, must be gpt2 or llama"),
        ("bpe", {"pre": "falcon"}, "tokenizer.ggml.pre is falcon, must be default or gpt-2 or smollm or llama-bpe"),
        ("bpe", {"pre": None}, "tokenizer.ggml.pre is None, must be default or gpt-2"),
        ("bpe", {"merges": None}, "tokenizer.ggml.merges must be strings"),
        ("bpe", {"merges": ["ab"]}, "merges holds ab, must be two tokens and a space between"),
        ("bpe", {"merges": ["no pe"]}, "is not a tokenizer: .*out of vocabulary"),
        ("bpe", {"tokens": None}, "tokenizer.ggml.tokens must be from 1 to"),
        ("bpe", {"tokens": ["a"] * 384}, "tokenizer.ggml.tokens has an empty string or one twice"),
        ("bpe", {"tokens": ["", *map(str, range(383))]}, "tokenizer.ggml.tokens has an empty string or one twice"),
        ("bpe", {"tokens": [str(i) for i in range(9)]}, "bos_token_id is 379, must be a token id below 9"),
        ("bpe", {"token_type": None}, "tokenizer.ggml.token_type must be an integer for each of 384 tokens"),
        ("bpe", {"token_type": [1] * 383}, "tokenizer.ggml.token_type must be an integer for each of 384 tokens"),
        ("bpe", {"token_type": [7] * 384}, "tokenizer.ggml.token_type holds 7, must be from 1 to 6"),
        ("bpe", {"eos_token_id": 384}, "tokenizer.ggml.eos_token_id is 384, must be a token id below 384"),
        ("bpe", {"add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1, must be of type bool"),
        ("sentencepiece", {"scores": None}, "scores must be a finite number for each of 384 tokens"),
        ("sentencepiece", {"scores": [0.0]}, "scores must be a finite number for each of 384 tokens"),
        ("sentencepiece", {"scores": [float("nan")] * 384}, "scores must be a finite number"),
        ("sentencepiece", {"token_type": [1] * 384}, "is not a sentencepiece model"),
        ("sentencepiece", {"token_type": [6] * 384}, "is not a sentencepiece model"),
    ],
)
def test_what_is_missing_or_malformed_is_named(tmp_path, kind, changes, message):
    metadata = tokenizer_metadata(kind) | {K + key: value for key, value in changes.items()}
    with pytest.raises(ModelError, match=message):
        made(tmp_path, metadata)


def test_the_chat_template_is_in_the_file(tmp_path):
    path = write(tmp_path / "m.gguf", "llama", tokenizer_metadata("bpe"), {})
    template = ChatTemplate.load(path, load_tokenizer(path))
    assert template.source == CHAT_TEMPLATE
    assert ChatTemplate.load(tmp_path, load_tokenizer(tmp_path)).render([{"role": "user", "content": "hi"}]) == (
        f"{CONTROL[0]}[user] hi\n[assistant] "
    )
    without = write(tmp_path / "n.gguf", "llama", {**tokenizer_metadata("bpe"), "tokenizer.chat_template": None}, {})
    with pytest.raises(ModelError, match=r"n\.gguf has no chat template"):
        ChatTemplate.load(without, load_tokenizer(without))
    wrong = write(tmp_path / "o.gguf", "llama", {**tokenizer_metadata("bpe"), "tokenizer.chat_template": 3}, {})
    with pytest.raises(ModelError, match=r"o\.gguf: chat_template must be a string"):
        ChatTemplate.load(wrong, load_tokenizer(path))
