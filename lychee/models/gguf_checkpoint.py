"""The weights of a GGUF file under their Hugging Face names, with the face of a safetensors checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lychee.kernels.types import Int4Weight, Int8Weight

from .files import ModelError
from .gguf_file import GGUFFile, GGUFTensor
from .gguf_header import shown
from .gguf_tensors import FLOATS, KEPT, can_dequantise, read_floats, read_quantised, take_rows
from .safetensors_io import TensorEntry

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"  # part of the config (gguf_config.py)
HEADS = {"self_attn.q_proj": "attention.head_count", "self_attn.k_proj": "attention.head_count_kv"}
INTERLEAVED = ("llama",)  # architectures whose converter moves the rows of q and k


@dataclass(frozen=True)
class GGUFCheckpoint:
    """Quantised matrices stay so. An entry's dtype is the file's name of the type (F16, Q4_0, Q6_K, ...).

    `heads`: the tensors whose rows the file has in another order, with the heads that they belong to.
    """

    path: Path
    entries: Mapping[str, TensorEntry]
    tensors: Mapping[str, GGUFTensor]
    heads: Mapping[str, int]

    @classmethod
    def open(cls, file: GGUFFile) -> GGUFCheckpoint:
        """Raises ModelError where a tensor is of a type that has no arithmetic here, naming both."""
        tensors = {hf_name(name): tensor for name, tensor in file.tensors.items() if name != ROPE_FACTORS}
        for tensor in tensors.values():
            if tensor.type not in FLOATS and not can_dequantise(tensor.type):
                raise ModelError(
                    f"{file.path}: tensor {shown(tensor.name)} has type {tensor.type.name}, must be "
                    "F32, F16, BF16 or a type of blocks that the gguf package can dequantise"
                )
        entries = {name: TensorEntry(file.path, t.type.name, t.shape) for name, t in tensors.items()}
        return cls(file.path, entries, tensors, _heads(file, tensors))

    @property
    def note(self) -> str | None:
        """A sentence naming the types that `read` rounds to int8, if any."""
        kinds = {t.type.name for t in self.tensors.values() if _quantised(t) and t.type not in KEPT}
        if not kinds:
            return None
        return f"{self.path}: tensors of type {' and '.join(sorted(kinds))} are rounded to int8 in groups of 32"

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor | Int8Weight | Int4Weight]]:
        """Tensors may be backed by the mapped file. Copy them: a mapping dies if its file is truncated."""
        for name in names:
            if _quantised(self.tensors[name]):
                weight = read_quantised(self.path, self.tensors[name])
                yield name, weight if name not in self.heads else take_rows(weight, self._order(name))
            else:
                yield name, self.floats(name, None)

    def as_floats(self, dtype: torch.dtype) -> GGUFFloats:
        """The same checkpoint with every tensor dequantised to `dtype`."""
        return GGUFFloats(self, dtype)

    def floats(self, name: str, dtype: torch.dtype | None) -> Tensor:
        floats = read_floats(self.path, self.tensors[name], dtype)
        return floats[self._order(name)] if name in self.heads else floats

    def _order(self, name: str) -> Tensor:
        return halves_of_pairs(self.tensors[name].shape[0], self.heads[name])


@dataclass(frozen=True)
class GGUFFloats:
    """A checkpoint whose tensors are all of one float dtype."""

    checkpoint: GGUFCheckpoint
    dtype: torch.dtype

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        kind = next(kind.name for kind, dtype in FLOATS.items() if dtype is self.dtype)
        return {name: replace(entry, dtype=kind) for name, entry in self.checkpoint.entries.items()}

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """As the checkpoint's."""
        return ((name, self.checkpoint.floats(name, self.dtype)) for name in names)


def _quantised(tensor: GGUFTensor) -> bool:
    return tensor.type not in FLOATS and len(tensor.shape) == 2


def hf_name(name: str) -> str:
    """A name that has no counterpart is kept, to be refused as unexpected by whoever knows what is expected."""
    match = re.fullmatch(r"(?:blk\.(0|[1-9][0-9]{0,5})\.)?([a-z_]+)\.(weight|bias)", name)
    if not match or match[2] not in NAMES:
        return name
    inside = f"model.layers.{match[1]}." if match[1] else ""
    made = f"{inside}{NAMES[match[2]]}.{match[3]}"
    in_layer = not NAMES[match[2]].startswith(("model.", "lm_head"))
    return made if in_layer == bool(inside) else name


def halves_of_pairs(num_rows: int, num_heads: int) -> Tensor:
    """For each row in Hugging Face's order (a head's first halves of rotary pairs, then the second), its GGUF row."""
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).reshape(-1)


def _heads(file: GGUFFile, tensors: Mapping[str, GGUFTensor]) -> dict[str, int]:
    """The number of heads of each tensor whose rows are to be put in order."""
    architecture = file.get("general.architecture", str, "")
    if architecture not in INTERLEAVED:
        return {}
    all_heads = file.get(f"{architecture}.attention.head_count", int, 1)
    heads = {}
    for name, tensor in tensors.items():
        key = HEADS.get(".".join(name.split(".")[3:5]))
        if key is None:
            continue
        heads[name] = file.get(f"{architecture}.{key}", int, all_heads)
        if heads[name] < 1 or tensor.shape[0] % (2 * heads[name]):
            raise ModelError(
                f"{file.path}: tensor {tensor.name} has {tensor.shape[0]} rows, must have an even number "
                f"for each of {heads[name]} heads"
            )
    return heads
