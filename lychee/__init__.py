"""Lossless speculative decoding for Llama-family models, written as Triton kernels.

from lychee import LLM, SamplingParams
llm = LLM("path/to/target", draft_model="path/to/draft")
print(llm.generate("Once upon a time", SamplingParams(max_tokens=64, temperature=0.7, seed=1))[0].outputs[0].text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .models.chat import ChatError
    from .models.files import ModelError
    from .runtime.checks import ParameterError
    from .runtime.config import SpeculativeConfig
    from .runtime.llm import LLM
    from .runtime.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "ChatError", "ModelError", "ParameterError", "SamplingParams", "SpeculativeConfig", "__version__"]

_HOMES = {
    "LLM": "runtime.llm",
    "ChatError": "models.chat",
    "ModelError": "models.files",
    "ParameterError": "runtime.checks",
    "SamplingParams": "runtime.sampling_params",
    "SpeculativeConfig": "runtime.config",
}


def __getattr__(name: str) -> Any:
    """Import on first use: a kernel test should not load the runtime."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lychee' has no attribute {name!r}")
    return getattr(import_module(f"lychee.{_HOMES[name]}"), name)
