"""Model directories and tokenizers shared by the tests of one session."""

import json

import pytest
import tokenizers
from sentencepiece import SentencePieceProcessor
from tokenizers import decoders, models, normalizers

from lychee.models.tokenizer_files import load_tokenizer
from tests.factory import save_tokenizer, sentencepiece_model

KINDS = ("sentencepiece", "bpe", "llama2_json")


def llama2_json() -> str:
    """The sentencepiece tokenizer as Llama 2's tokenizer.json spells it: Prepend, Replace, byte fallback, Strip."""
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
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return tokenizer.to_str()


@pytest.fixture(scope="session")
def tokenizer_dirs(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    save_tokenizer(root / "sentencepiece", "sentencepiece")
    save_tokenizer(root / "bpe", "bpe")
    (root / "llama2_json").mkdir()
    (root / "llama2_json" / "tokenizer.json").write_text(llama2_json())
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True}
    (root / "llama2_json" / "tokenizer_config.json").write_text(json.dumps(config))
    return {kind: root / kind for kind in KINDS}


@pytest.fixture(scope="session")
def all_tokenizers(tokenizer_dirs):
    return {kind: load_tokenizer(path) for kind, path in tokenizer_dirs.items()}


@pytest.fixture(params=KINDS)
def tokenizer(request, all_tokenizers):
    return all_tokenizers[request.param]
