"""Tiny Llama model directories made on the spot: config.json, safetensors and a tokenizer, without transformers."""

import functools
import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

TOKENIZER_SIZE = 384  # both tokenizer kinds; a model's vocabulary may be larger (padding), never smaller
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps in the sun.",
    "Hello world! Speculative decoding drafts a few tokens and verifies them in one pass.",
    "def add(first, second):\n    return first + second  # a comment\n",
    "A user asks: how many lychees are in the basket? There are twelve lychees in the basket.",
    "Crème brûlée à la carte; größer, niño, 日本語, 中文, 你好世界.",
] * 4
CONTROL = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@functools.cache
def sentencepiece_model() -> bytes:
    """A Llama 2 style BPE tokenizer.model: dummy prefix, byte fallback, ids 0..2 = <unk>, <s>, </s>."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=TOKENIZER_SIZE,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


@functools.cache
def bpe_json() -> str:
    """A Llama 3 style byte-level BPE tokenizer.json with added special tokens after the vocabulary."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(LLAMA3_SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE - len(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in CONTROL])
    bos = (CONTROL[0], tokenizer.token_to_id(CONTROL[0]))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return tokenizer.to_str()


def save_tokenizer(path: Path, kind: str, **config: Any) -> None:
    """Write the "sentencepiece" or "bpe" tokenizer and its tokenizer_config.json."""
    path.mkdir(parents=True, exist_ok=True)
    if kind == "sentencepiece":
        (path / "tokenizer.model").write_bytes(sentencepiece_model())
        defaults = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    else:
        (path / "tokenizer.json").write_text(bpe_json())
        defaults = {"bos_token": CONTROL[0], "eos_token": CONTROL[1]}
    merged = {**defaults, "chat_template": CHAT_TEMPLATE, **config}
    (path / "tokenizer_config.json").write_text(json.dumps(merged))


def random_weights(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Weights under Hugging Face names, sized so that greedy text wanders."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    weights = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden, std=0.3)}
    for i in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (q_size, hidden),
            "self_attn.k_proj": (kv_size, hidden),
            "self_attn.v_proj": (kv_size, hidden),
            "self_attn.o_proj": (hidden, q_size),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        for name, shape in shapes.items():
            gain = 2.0 if name.endswith(("q_proj", "k_proj", "v_proj")) else 1.0
            weights[f"model.layers.{i}.{name}.weight"] = normal(*shape, std=gain * shape[1] ** -0.5)
            biased = config["mlp_bias"] if name.startswith("mlp") else config["attention_bias"]
            if biased:
                weights[f"model.layers.{i}.{name}.bias"] = normal(shape[0], std=0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{i}.{name}.weight"] = 1 + normal(hidden, std=0.2)
    weights["model.norm.weight"] = 1 + normal(hidden, std=0.2)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(config["vocab_size"], hidden, std=0.3)
    return weights


def save_weights(path: Path, weights: dict[str, Tensor], shards: int = 1) -> None:
    """One model.safetensors, or `shards` files with an index."""
    if shards == 1:
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(weights)
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    for i, file in enumerate(files):
        save_file({n: weights[n] for n in names[i::shards]}, path / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: files[i % shards] for i, n in enumerate(names)}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def make_model_dir(
    path: Path,
    *,
    vocab: int = TOKENIZER_SIZE,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 96,
    tie: bool = True,
    seed: int = 0,
    noise_of: Path | None = None,
    noise: float = 0.0,
    max_position: int = 256,
    eos: int | list[int] | None = None,
    tokenizer: str | None = "sentencepiece",
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    **config: Any,
) -> Path:
    """Save a random Llama and return its path.

    `noise_of` copies that directory's weights (same shape; the vocabulary may be padded further) and adds `noise` times
    each tensor's own standard deviation: noise 0 is D = T; 0.02, 0.05 and 0.1 agree on about 85, 60 and 45 % of greedy
    tokens. `eos` None is the tokenizer's own. `tokenizer` is "sentencepiece", "bpe" or None; `config` overrides
    config.json.
    """
    path.mkdir(parents=True, exist_ok=True)
    if tokenizer and vocab < TOKENIZER_SIZE:
        raise ValueError(f"vocab {vocab} is smaller than the tokenizer ({TOKENIZER_SIZE}); pass tokenizer=None")
    own_bos, own_eos = (TOKENIZER_SIZE - len(CONTROL), TOKENIZER_SIZE - 4) if tokenizer == "bpe" else (1, 2)
    full = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "tie_word_embeddings": tie,
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "bos_token_id": own_bos,
        "eos_token_id": own_eos if eos is None else eos,
        **config,
    }
    (path / "config.json").write_text(json.dumps(full))
    weights = random_weights(full, seed)
    if noise_of is not None:
        generator = torch.Generator().manual_seed(seed + 1)
        for name, source in load_file(noise_of / "model.safetensors").items():
            jitter = torch.randn(source.shape, generator=generator) * noise * source.float().std()
            weights[name][: len(source)] = source.float() + jitter
    save_weights(path, {name: w.to(dtype).contiguous() for name, w in weights.items()}, shards)
    if tokenizer:
        save_tokenizer(path, tokenizer)
    return path
