"""How large a model is, by its headers alone."""

from __future__ import annotations

import math
import re

import torch

from .config import ModelConfig
from .model_files import OpenedModel
from .shared_embedding import companions
from .weights import FLOATS, expected_shapes

FOUR_BITS = re.compile(r"(?<![0-9])4(?!_K)")  # in the name of a format: int4-g32-min, Q4_1; of Q4_K int8 is made


def num_parameters(config: ModelConfig) -> int:
    """Of the model's own: a tied head counts once, and what a draft shares with its target not at all."""
    beside = companions(config.output_vocab, config.hidden_size) if config.output_vocab else {}
    return sum(math.prod(shape) for name, shape in expected_shapes(config).items() if name not in beside)


def weight_bytes(opened: OpenedModel, dtype: torch.dtype) -> int:
    """About what the weights will take in memory, floats being of `dtype`; scales count as in groups of 32."""
    found = 0.0
    for name, shape in expected_shapes(opened.config).items():
        kind = opened.source.entries[name].dtype if name in opened.source.entries else FLOATS[0]
        quantised = kind not in FLOATS and len(shape) == 2
        found += math.prod(shape) * (_quantised(kind) if quantised else dtype.itemsize)
    return int(found)


def _quantised(kind: str) -> float:
    """Bytes of an element."""
    return 0.75 if FOUR_BITS.search(kind) else 1.125
