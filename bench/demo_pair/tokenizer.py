"""The shared vocabulary of the pair, and the corpus as arrays of token ids."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import sentencepiece

from .corpus import KINDS, Documents
from .files import write_json

BOS, EOS = 1, 2
BYTES_PER_KIND = 2_500_000
"""How much text of each kind the vocabulary is learnt from."""

Arrays = dict[str, np.ndarray]


def train(documents: Documents, path: Path, size: int = 4096) -> None:
    """Learn a byte-fallback BPE vocabulary; every common Chinese character gets a piece of its own."""
    seen = Counter("".join(documents["zh"]))
    common = "".join(c for c, n in seen.items() if n >= 15 and "\u4e00" <= c <= "\u9fff")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines(documents), model_prefix=str(path.with_suffix("")), model_type="bpe", vocab_size=size,
        byte_fallback=True, character_coverage=0.9985, required_chars=common, normalization_rule_name="identity",
        remove_extra_whitespaces=False, add_dummy_prefix=False, allow_whitespace_only_pieces=True, split_digits=True,
        user_defined_symbols=["\n"], max_sentence_length=8192, unk_id=0, bos_id=BOS, eos_id=EOS, pad_id=-1,
        minloglevel=1,
    )  # fmt: skip


def lines(documents: Documents) -> Iterator[str]:
    """The lines that the vocabulary is learnt from."""
    for kind in KINDS:
        left = BYTES_PER_KIND
        for document in documents[kind]:
            for line in filter(None, document.split("\n")):
                left -= len(line.encode())
                yield line
            if left < 0:
                break


def encode(path: Path, train_documents: Documents, held_documents: Documents) -> Arrays:
    """Arrays ``<kind>_train`` and ``<kind>_held``: documents one after another, each between BOS and EOS."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    arrays: Arrays = {}
    for part, documents in (("train", train_documents), ("held", held_documents)):
        for kind in KINDS:
            ids = [i for d in documents[kind] for i in (BOS, *processor.encode(d + "\n"), EOS)]
            arrays[f"{kind}_{part}"] = np.array(ids, dtype=np.uint16)
    return arrays


def install(path: Path, folder: Path) -> None:
    """Put the vocabulary, and how to use it, into a model directory."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, folder / "tokenizer.model")
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "add_bos_token": True, "add_eos_token": False, "add_prefix_space": False, "legacy": False,
        "model_max_length": 512,
    })  # fmt: skip
