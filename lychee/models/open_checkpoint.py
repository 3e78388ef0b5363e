"""Opens the weights of a model directory, by what its config says of their quantisation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .awq import open_awq
from .files import ModelError
from .gptq import open_gptq
from .quantized_checkpoint import METHOD, QuantizedCheckpoint
from .safetensors_io import Checkpoint
from .tensor_source import TensorSource


def open_checkpoint(path: Path, config_values: Mapping[str, Any]) -> TensorSource:
    """`config_values` is the directory's config.json. Raises ModelError."""
    settings = config_values.get("quantization_config")
    if settings is None:
        return Checkpoint.open(path)
    where = f"{path / 'config.json'}: quantization_config"
    if not isinstance(settings, dict):
        raise ModelError(f"{where} is {str(settings)[:80]!r}, must be an object or null")
    method = settings.get("quant_method")
    if method == METHOD:
        return QuantizedCheckpoint.open(path, settings)
    if method == "gptq":
        return open_gptq(path, settings, config_values)
    if method == "awq":
        return open_awq(path, settings, config_values)
    raise ModelError(
        f"{where}.quant_method is {str(method)[:80]!r}, must be {METHOD}, gptq (4 or 8 bits) or awq (4 bits, gemm); "
        "or give the model as floats, and quantise it as it is loaded"
    )
