"""Tiny random models of every family, made and saved by transformers itself, and its logits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from lychee.models.batch import Batch
from lychee.models.kv_cache import KVCache
from lychee.models.llama import Llama

VOCAB, BLOCK_SIZE, NUM_BLOCKS = 90, 8, 40
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "LlamaForCausalLM": transformers.LlamaConfig,
    "MistralForCausalLM": transformers.MistralConfig,
    "Qwen2ForCausalLM": transformers.Qwen2Config,
    "Qwen3ForCausalLM": transformers.Qwen3Config,
}


def save_family(path: Path, architecture: str, **config: Any) -> Any:
    """Transformers' model, in fp32, with weights that make logits of some size; saved to the path."""
    model = getattr(transformers, architecture)(CONFIGS[architecture](**{**TINY, **config})).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            std = (
                0.4
                if weight.ndim == 1
                else 0.3
                if "embed" in name or "lm_head" in name
                else 1.5 / weight.shape[1] ** 0.5
            )
            weight.copy_(torch.randn(weight.shape, generator=generator) * std + ("norm" in name))
    model.save_pretrained(path)
    return model


@torch.no_grad()
def theirs_on(model: Any, tokens: Sequence[int]) -> Tensor:
    return model(torch.tensor([tokens])).logits[0]


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


class Run:
    """One sequence of our model in scattered blocks of a cache of its own; every slot that holds no token is NaN."""

    def __init__(self, model: Llama, seed: int = 0) -> None:
        self.model, self.length = model, 0
        self.kv = KVCache.allocate(model.config, NUM_BLOCKS, BLOCK_SIZE, torch.float32, "cpu")
        self.kv.storage.fill_(float("nan"))
        self.table = np.random.default_rng(seed).permutation(NUM_BLOCKS).tolist()

    def prefill(self, tokens: Sequence[int], chunk: int | None = None) -> Tensor:
        logits = []
        for at in range(0, len(tokens), chunk or len(tokens)):
            part = tokens[at : at + (chunk or len(tokens))]
            logits.append(self.model.forward(Batch.prefill([part], [self.length], [self.table], BLOCK_SIZE), self.kv))
            self.length += len(part)
        return torch.cat(logits)

    def decode(self, token: int) -> Tensor:
        logits = self.tree([token], [-1])
        self.length += 1
        return logits

    def tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        batch = Batch.decode([tokens], [parents], [self.length], [self.table], BLOCK_SIZE)
        return self.model.forward(batch, self.kv)

    def forget(self, until: int) -> None:
        """NaN in place of what positions below `until` stored."""
        positions = torch.arange(until)
        slots = torch.tensor(self.table)[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        self.kv.storage[:, :, slots] = float("nan")


def close(got: Tensor, want: Tensor) -> None:
    assert want.std() > 0.3  # or equal logits would say little
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
