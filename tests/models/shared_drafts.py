"""Drafts that share their target's embedding, written on the spot from a target's own layers."""

import json

import torch
from safetensors.torch import load_file, save_file

from lychee.models.shared_embedding import PROBED
from tests.factory import TOKENIZER_SIZE, make_model_dir

IDS = tuple(i for i in range(TOKENIZER_SIZE) if i % 3 != 1)  # without a third of the tokens, <s> among them
OWN = ("model.embed_tokens.weight", "lm_head.weight")


def write_draft(path, target, noise=0.05, ids=IDS, change=None, **config):
    """The target's layers with noise, and its embedding left out.

    `change` may alter the dict of tensors before it is written; `config` overrides what config.json would have.
    """
    embed = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    tie = json.loads((target / "config.json").read_text())["tie_word_embeddings"]
    make_model_dir(path, noise_of=target, noise=noise, vocab=len(embed), tie=tie, tokenizer=None)
    made = load_file(path / "model.safetensors")
    tensors = {name: weight.half() for name, weight in made.items() if name not in OWN}
    tensors["output_ids"] = torch.tensor(ids, dtype=torch.int64)
    tensors["embed_probe"] = embed[torch.arange(PROBED) * len(embed) // PROBED].half()
    if change is not None:
        change(tensors)
    save_file(tensors, path / "model.safetensors")
    values = json.loads((path / "config.json").read_text())
    own = {"lychee_draft": {"shares_embedding": True, "output_vocab": len(ids)}}
    (path / "config.json").write_text(json.dumps(values | own | config))
    return path
