"""transformers in float32: plain greedy generation, or prompt lookup decoding."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.generation import BaseStreamer

from . import Generated, Setup

LOOKUP_TOKENS = 3  # as its documentation has it


class Arrivals(BaseStreamer):  # type: ignore[misc]
    """When each group of tokens came; the first is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class TransformersSide:
    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        path = Path(setup.model)
        self.model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None
        lookup = {"prompt_lookup_num_tokens": setup.lookup_tokens or LOOKUP_TOKENS} if setup.options["lookup"] else {}
        self.options = {"do_sample": False, "pad_token_id": 0, **lookup}
        attention = self.model.config._attn_implementation
        self.about = f"transformers {transformers.__version__}, torch {torch.__version__}, {attention} attention"
        self.about += "".join(f", {name} {value}" for name, value in lookup.items())
        self._caches: dict[int, DynamicCache] = {}

    def generate(self, prompt: list[int], max_tokens: int) -> Generated:
        arrivals, start = Arrivals(), time.perf_counter()
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            made = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, streamer=arrivals, **self.options
            )
        seconds = time.perf_counter() - start
        return Generated(made[0, len(prompt) :].tolist(), seconds, arrivals.times[1] - start, len(arrivals.times) - 1)

    def pass_ms(self, rows: int, context: int) -> float:
        ids = torch.full((1, rows), 3)
        with torch.inference_mode():
            cache = self._cached(context)
            start = time.perf_counter()
            self.model(ids, past_key_values=cache)
            seconds = time.perf_counter() - start
        cache.crop(-rows)
        return 1e3 * seconds

    def _cached(self, context: int) -> DynamicCache:
        if context not in self._caches:
            self._caches[context] = DynamicCache(config=self.model.config)
            if context:
                self.model(torch.full((1, context), 3), past_key_values=self._caches[context], logits_to_keep=1)
        return self._caches[context]

    def logits_of(self, tokens: list[int], candidates: list[int]) -> list[float]:
        with torch.inference_mode():
            found: list[float] = self.model(torch.tensor([tokens]), logits_to_keep=1).logits[0, -1, candidates].tolist()
        return found
