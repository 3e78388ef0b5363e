"""Configs: both rope schemas, defaults, and a sentence for whatever changes the arithmetic or makes no sense."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from lychee.models.config import ModelConfig
from lychee.models.files import ModelError
from lychee.models.rope import RopeConfig, inverse_frequencies, rope_table

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES = [
    ({}, RopeConfig(theta=10000.0)),
    ({"rope_theta": 500000, "rope_scaling": None}, RopeConfig(theta=500000.0)),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeConfig("linear", 10000.0, 2.0)),
    (
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 64),
    ),
    (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 64),
    ),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeConfig(theta=5e5)),
    ({"rope_parameters": {"rope_type": "linear", "factor": 3}, "rope_theta": 7e4}, RopeConfig("linear", 7e4, 3.0)),
    (
        {
            "rope_scaling": {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": None},
            "max_position_embeddings": 4096,
        },
        RopeConfig("llama3", 10000.0, 8.0, 1.0, 4.0, 4096),
    ),
]


def without_null(value):
    return {k: without_null(v) if isinstance(v, dict) else v for k, v in value.items() if v is not None}


@pytest.mark.parametrize(("values", "want"), ROPES)
def test_both_rope_schemas_give_transformers_frequencies(values, want):
    config = ModelConfig.parse({**BASE, **values})
    assert config.rope == want
    theirs = transformers.LlamaConfig(**json.loads(json.dumps(without_null({**BASE, **values}))))
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    torch.testing.assert_close(inverse_frequencies(config.rope, config.head_dim), module.inv_freq, rtol=1e-6, atol=0)
    cos, sin = module(torch.zeros(1), torch.arange(300)[None])
    ours = rope_table(config.rope, config.head_dim, 300)
    torch.testing.assert_close(ours, torch.cat([cos[0, :, :8], sin[0, :, :8]], -1), rtol=0, atol=1e-4)


def test_what_a_config_leaves_out_is_derived():
    config = ModelConfig.parse(BASE)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert (config.rms_norm_eps, config.max_positions, config.dtype) == (1e-6, 2048, torch.float32)
    assert (config.tie_word_embeddings, config.biased, config.qk_norm) == (False, frozenset(), False)
    assert config.windows == (0, 0)
    assert config.eos_token_ids == frozenset()
    given = ModelConfig.parse({**BASE, "head_dim": 32, "num_key_value_heads": 2, "torch_dtype": "bfloat16"})
    assert (given.num_kv_heads, given.head_dim, given.dtype) == (2, 32, torch.bfloat16)
    assert ModelConfig.parse({**BASE, "dtype": "float16"}).dtype == torch.float16


def test_every_end_of_sequence_id_of_either_file_counts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": 2}))
    assert ModelConfig.load(tmp_path).eos_token_ids == {2}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert ModelConfig.load(tmp_path).eos_token_ids == {2, 7, 9}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, r"architectures is .*Mixtral.*, must be \[LlamaForCausalLM\] or"),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "architectures is .*, must be"),
        ({"model_type": "qwen2"}, "model_type is qwen2, must be llama with LlamaForCausalLM"),
        ({"model_type": "gemma"}, "model_type is gemma, must be llama or mistral or qwen2 or qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu, must be null or silu or swish"),
        ({"sliding_window": 4096}, "sliding_window is 4096, must be null"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, must be null or 1"),
        ({"qk_norm": True}, "qk_norm is true, must be null or false"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": 0}, "vocab_size is 0, must be an integer from 1"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0, must be an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers is true, must be an integer"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, must be an integer from 1 to 1024"),
        ({"max_position_embeddings": 1 << 40}, "max_position_embeddings is 1099511627776"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads is 3, must be a divisor of num_attention_heads \(4\)"),
        ({"hidden_size": 66}, r"hidden_size is 66, must be a multiple of num_attention_heads \(4\)"),
        ({"head_dim": 15}, "head_dim is 15, must be even"),
        ({"hidden_size": 60}, "head_dim is 15, must be even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, must be a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, must be a number above 0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, must be true or false"),
        ({"attention_bias": "no"}, "attention_bias is no, must be true or false"),
        ({"eos_token_id": -1}, "eos_token_id is -1, must be a token id below vocab_size"),
        ({"eos_token_id": [1, 100]}, r"eos_token_id is \[1, 100\], must be a token id below vocab_size \(100\)"),
        ({"torch_dtype": "float8"}, "torch_dtype is float8, must be float32 or float16 or bfloat16"),
        ({"rope_theta": -1}, "rope_theta is -1, must be a number above 0"),
        ({"rope_parameters": {"rope_type": "su"}}, "rope_parameters.rope_type is su, must be default or linear or"),
        ({"rope_scaling": 2}, "rope_scaling is 2, must be an object or null"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5, must be at least 1"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2', must be a number above 0"),
        ({"rope_scaling": {"type": "llama3", "factor": 2}}, "low_freq_factor is missing"),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 4.0}},
            "low_freq_factor is 4.0, must be below high_freq_factor",
        ),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2}},
            "rope_scaling is .*, must be absent beside rope_parameters",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_naming_key_value_and_allowed(values, message):
    with pytest.raises(ModelError, match=f"^config.json.*: .*{message}"):
        ModelConfig.parse({**BASE, **values})


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not JSON"), ("[]", "holds a list"), ("[" * 100000, "is not JSON"), ('{"a": 1, "a": 2}', "'a' twice")],
)
def test_a_config_that_is_no_object_is_refused_naming_the_file(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=rf"config\.json.*{message}"):
        ModelConfig.load(tmp_path)


def test_a_directory_without_config_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        ModelConfig.load(Path(tmp_path))
