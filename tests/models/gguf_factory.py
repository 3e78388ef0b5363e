"""GGUF files made on the spot, by the gguf package's writer, from model directories of tests.factory."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor

from tests.factory import CHAT_TEMPLATE, bpe_json, sentencepiece_model

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def paired(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as converters of the llama architecture put them: the two of a rotary pair side by side."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def to_gguf(
    path: Path,
    model: Path,
    architecture: str = "llama",
    kind: Kind | Callable[[str], Kind] = Kind.F32,
    tokenizer: str | None = "sentencepiece",
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write the model of a directory. `kind` is of the matrices; None in `metadata` leaves a key out."""
    config = json.loads((model / "config.json").read_text())
    values: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]),
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
    }
    written = {f"{architecture}.{key}": value for key, value in values.items()}
    written |= {} if tokenizer is None else tokenizer_metadata(tokenizer)
    return write(path, architecture, written | dict(metadata or {}), tensors(model, config, architecture), kind)


def tensors(model: Path, config: Mapping[str, Any], architecture: str) -> dict[str, np.ndarray]:
    """Under GGUF names, float32."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    made = {}
    for name, weight in load_file(model / "model.safetensors").items():
        array = weight.float().numpy()
        part = name.split(".")[-2]
        made[gguf_name(name)] = paired(array, heads[part]) if architecture == "llama" and part in heads else array
    return made


def write(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    kind: Kind | Callable[[str], Kind] = Kind.F32,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add_value(writer, key, value)
    for name, weight in weights.items():
        chosen = kind if isinstance(kind, Kind) else kind(name)
        if weight.ndim == 1 or chosen is Kind.F32:
            writer.add_tensor(name, np.ascontiguousarray(weight))
        else:
            writer.add_tensor(name, quants.quantize(np.ascontiguousarray(weight), chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if key == "general.alignment":
        writer.add_custom_alignment(value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def tokenizer_metadata(kind: str) -> dict[str, Any]:
    """The factory's tokenizer of this kind, as converters write it."""
    template = {"tokenizer.chat_template": CHAT_TEMPLATE}
    if kind == "bpe":
        return {**bpe_metadata(json.loads(bpe_json()), "llama-bpe"), **template}
    processor = SentencePieceProcessor(model_proto=sentencepiece_model())
    ids = range(processor.vocab_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [float(processor.get_score(i)) for i in ids],
        "tokenizer.ggml.token_type": [piece_type(processor, i) for i in ids],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **template,
    }


def piece_type(processor: SentencePieceProcessor, i: int) -> int:
    return 6 if processor.is_byte(i) else 3 if processor.is_control(i) else 2 if processor.is_unknown(i) else 1


def bpe_metadata(spec: Mapping[str, Any], pre: str) -> dict[str, Any]:
    added = {token["id"]: token["content"] for token in spec["added_tokens"]}
    by_id = added | {i: string for string, i in spec["model"]["vocab"].items()}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [by_id[i] for i in range(len(by_id))],
        "tokenizer.ggml.token_type": [3 if i in added else 1 for i in range(len(by_id))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in spec["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": min(added),
        "tokenizer.ggml.eos_token_id": min(added) + 1,
    }


def random_blocks(kind: Kind, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Bytes of a block type that mean finite weights: no byte has the high bits of a float16 that is not."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    return rng.integers(0, 0x3C, (rows, columns // block * block_bytes), dtype=np.uint8)


def dequantised(data: np.ndarray, kind: Kind) -> torch.Tensor:
    return torch.from_numpy(quants.dequantize(data, kind))
