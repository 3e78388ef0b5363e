"""llama.cpp through llama-cpp-python, on the file's own formats: plain, or with its prompt lookup decoding."""

from __future__ import annotations

import time

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from . import Generated, Setup

LOOKUP_TOKENS = 2  # as its documentation has it for the CPU


class Counted(LlamaPromptLookupDecoding):  # type: ignore[misc]
    """Prompt lookup that counts how often it was asked, once after every pass but the last."""

    calls = 0

    def __call__(self, input_ids: np.ndarray, /, **kwargs: object) -> np.ndarray:
        self.calls += 1
        return super().__call__(input_ids, **kwargs)


class LlamaCppSide:
    def __init__(self, setup: Setup) -> None:
        self.lookup = Counted(num_pred_tokens=setup.lookup_tokens or LOOKUP_TOKENS) if setup.options["lookup"] else None
        self.llm = llama_cpp.Llama(
            setup.model,
            n_ctx=setup.context,
            n_threads=setup.threads,
            n_threads_batch=setup.threads,
            draft_model=self.lookup,
            verbose=False,
        )
        build = llama_cpp.llama_print_system_info().decode().strip()
        self.about = f"llama-cpp-python {llama_cpp.__version__}, {build}"
        self.about += f" num_pred_tokens {self.lookup.num_pred_tokens}" if self.lookup else ""

    def generate(self, prompt: list[int], max_tokens: int) -> Generated:
        """Nothing of an earlier prompt is reused."""
        self.llm.reset()
        calls = self.lookup.calls if self.lookup else 0
        tokens: list[int] = []
        first, start = 0.0, time.perf_counter()
        for token in self.llm.generate(prompt, temp=0.0):
            tokens.append(token)
            if len(tokens) == 1:
                first = time.perf_counter() - start
            if len(tokens) == max_tokens:
                break
        seconds = time.perf_counter() - start
        passes = self.lookup.calls - calls + 1 if self.lookup else max_tokens
        return Generated(tokens, seconds, first, passes)

    def pass_ms(self, rows: int, context: int) -> float:
        if self.llm.n_tokens < context:
            self.llm.reset()
            self.llm.eval([3] * context)
        self.llm.n_tokens = context
        start = time.perf_counter()
        self.llm.eval([3] * rows)
        return 1e3 * (time.perf_counter() - start)

    def logits_of(self, tokens: list[int], candidates: list[int]) -> list[float]:
        self.llm.reset()
        self.llm.eval(tokens)
        logits = np.ctypeslib.as_array(self.llm._ctx.get_logits_ith(-1), shape=(self.llm.n_vocab(),))
        found: list[float] = logits[candidates].tolist()
        return found
