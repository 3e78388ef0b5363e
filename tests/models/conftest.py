"""Model directories and tokenizers shared by the tests of one session."""

import json

import pytest
import tokenizers
from sentencepiece import SentencePieceProcessor
from tokenizers import decoders, models, normalizers, pre_tokenizers

from lychee.models.tokenizer_files import load_tokenizer
from tests.factory import save_tokenizer, sentencepiece_model

KINDS = ("sentencepiece", "bpe", "llama2_json", "metaspace")


def sentencepiece_json(metaspace: bool) -> str:
    """The sentencepiece tokenizer as a tokenizer.json: spaces by Prepend, Replace, Strip (Llama 2) or by Metaspace."""
    processor = SentencePieceProcessor(model_proto=sentencepiece_model())
    vocab = {processor.id_to_piece(i): i for i in range(processor.vocab_size())}
    merges = [(piece[:cut], piece[cut:], i) for piece, i in vocab.items() for cut in range(1, len(piece))]
    ranked = sorted((m for m in merges if m[0] in vocab and m[1] in vocab and m[2] > 258), key=lambda m: m[2])
    model = models.BPE(
        vocab,
        [m[:2] for m in ranked if not m[0].startswith("<0x")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace("▁", prepend_scheme="first")]
        )
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    tokenizer.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return tokenizer.to_str()


def readable(kind: str, text: str) -> str:
    """What decoding can give back: Metaspace lets a text's own first space stand for the dummy prefix."""
    return text.removeprefix(" ") if kind == "metaspace" else text


@pytest.fixture(scope="session")
def tokenizer_dirs(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    save_tokenizer(root / "sentencepiece", "sentencepiece")
    save_tokenizer(root / "bpe", "bpe")
    for kind in ("llama2_json", "metaspace"):
        (root / kind).mkdir()
        (root / kind / "tokenizer.json").write_text(sentencepiece_json(kind == "metaspace"))
        config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True}
        (root / kind / "tokenizer_config.json").write_text(json.dumps(config))
    return {kind: root / kind for kind in KINDS}


@pytest.fixture(scope="session")
def all_tokenizers(tokenizer_dirs):
    return {kind: load_tokenizer(path) for kind, path in tokenizer_dirs.items()}


@pytest.fixture(params=KINDS)
def tokenizer(request, all_tokenizers):
    return all_tokenizers[request.param]
