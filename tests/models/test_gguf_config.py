"""GGUF metadata as a config: the one that was converted, and a sentence for whatever may change the arithmetic."""

import json

import gguf
import numpy as np
import pytest

from lychee.models.config import ModelConfig
from lychee.models.files import ModelError
from lychee.models.gguf_config import config_values
from lychee.models.gguf_file import GGUFFile
from lychee.models.rope import RopeConfig, inverse_frequencies
from tests.factory import make_model_dir
from tests.models.gguf_factory import tensors, to_gguf, write

SMALL = {"vocab": 40, "hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 32, "layers": 1, "tokenizer": None}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.fixture
def model(tmp_path):
    return make_model_dir(tmp_path / "m", **SMALL)


def values(tmp_path, model, architecture="llama", **metadata):
    keys = {key.replace("__", "."): value for key, value in metadata.items()}
    path = to_gguf(tmp_path / "m.gguf", model, architecture, tokenizer=None, metadata=keys)
    return config_values(GGUFFile.open(path))


@pytest.mark.parametrize("changes", [{}, {"tie": False}, {"head_dim": 64}, {"rope_theta": 5e5, "rms_norm_eps": 1e-6}])
def test_the_config_is_the_converted_ones(tmp_path, changes):
    model = make_model_dir(tmp_path / "m", **SMALL, **changes)
    got = ModelConfig.parse(values(tmp_path, model, tokenizer__ggml__eos_token_id=2))
    assert got == ModelConfig.load(model)


def test_ends_of_a_turn_and_of_a_message_end_texts(tmp_path, model):
    ends = {"tokenizer__ggml__eos_token_id": 7, "tokenizer__ggml__eot_token_id": 9, "tokenizer__ggml__eom_token_id": 7}
    assert values(tmp_path, model, **ends)["eos_token_id"] == [7, 9]
    assert values(tmp_path, model)["eos_token_id"] == []


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "float16")]
)
def test_the_dtype_is_that_of_the_matrices(tmp_path, model, kind, dtype):
    path = to_gguf(tmp_path / "m.gguf", model, kind=gguf.GGMLQuantizationType[kind], tokenizer=None)
    assert config_values(GGUFFile.open(path))["torch_dtype"] == dtype


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")],
)
def test_architectures_are_named_as_transformers_does(tmp_path, model, architecture, name):
    got = values(tmp_path, model, architecture)
    assert (got["architectures"], got["model_type"], got["sliding_window"]) == ([name], architecture, None)


def test_a_llama_with_a_window_is_a_mistral(tmp_path, model):
    got = values(tmp_path, model, llama__attention__sliding_window=4096)
    assert (got["architectures"], got["model_type"], got["sliding_window"]) == (["MistralForCausalLM"], "mistral", 4096)


@pytest.mark.parametrize(
    ("metadata", "want"),
    [
        ({}, None),
        ({"llama__rope__scaling__type": "none"}, None),
        (
            {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"llama__rope__scaling__factor": 2.5}, {"rope_type": "linear", "factor": 2.5}),
        ({"llama__rope__scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"llama__rope__scale_linear": 1.0}, None),
        (
            {
                "llama__rope__scaling__type": "yarn",
                "llama__rope__scaling__factor": 4.0,
                "llama__rope__scaling__original_context_length": 64,
                "llama__rope__scaling__yarn_beta_fast": 16.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_scaling(tmp_path, model, metadata, want):
    got = values(tmp_path, model, **metadata, llama__rope__freq_base=70000.0)
    assert (got["rope_theta"], got["rope_scaling"]) == (70000.0, want)


def with_factors(tmp_path, factors, head_dim=64):
    model = make_model_dir(tmp_path / "m", **SMALL, head_dim=head_dim, rope_theta=500000.0)
    good = GGUFFile.open(to_gguf(tmp_path / "good.gguf", model, tokenizer=None))
    config = json.loads((model / "config.json").read_text())
    metadata = {key: value for key, value in good.metadata.items() if key.startswith("llama.")}
    weights = tensors(model, config, "llama") | {"rope_freqs.weight": factors}
    return GGUFFile.open(write(tmp_path / "m.gguf", "llama", metadata, weights))


@pytest.mark.parametrize("original", [8192, 1024, 131072])
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_found_from_its_factors(tmp_path, factor, original):
    rope = RopeConfig("llama3", 500000.0, factor, 1.0, 4.0, original)
    plain, scaled = inverse_frequencies(RopeConfig(theta=500000.0), 64), inverse_frequencies(rope, 64)
    config = ModelConfig.parse(config_values(with_factors(tmp_path, (plain / scaled).numpy())))
    np.testing.assert_allclose(inverse_frequencies(config.rope, 64), scaled, rtol=1e-6)


def test_factors_of_one_are_no_scaling(tmp_path):
    assert config_values(with_factors(tmp_path, np.ones(32, np.float32)))["rope_scaling"] is None


@pytest.mark.parametrize(
    "factors", [np.linspace(1, 8, 32), np.full(32, np.nan), np.full(32, -1.0), np.zeros(32), np.full(32, np.inf)]
)
def test_other_factors_are_refused(tmp_path, factors):
    with pytest.raises(ModelError, match=r"rope_freqs.weight has values of no Llama 3 scaling"):
        config_values(with_factors(tmp_path, factors.astype(np.float32)))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama__context_length": None}, "llama.context_length is missing"),
        ({"llama__attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ({"llama__block_count": "x"}, "llama.block_count is x, must be of type int"),
        ({"llama__attention__head_count": [2, 2]}, "llama.attention.head_count is .*, must be of type int"),
        ({"llama__expert_count": 8}, "llama.expert_count is 8, must be 0"),
        ({"llama__attention__causal": False}, "llama.attention.causal is False, must be True"),
        ({"llama__attention__scale": 0.5}, "llama.attention.scale is not known here, and may change what is computed"),
        ({"llama__logit_scale": 0.5}, "llama.logit_scale is not known here"),
        ({"llama__final_logit_softcapping": 30.0}, "llama.final_logit_softcapping is not known here"),
        ({"llama__rope__dimension_count": 8}, r"llama.rope.dimension_count is 8, must be the size of a head \(16\)"),
        ({"llama__attention__value_length": 8}, r"value_length is 8, must be the size of a head \(16\)"),
        ({"llama__vocab_size": 41}, r"llama.vocab_size is 41, must be the rows of token_embd.weight \(40\)"),
        ({"llama__rope__scaling__type": "longrope"}, "scaling.type is longrope, must be none or linear or yarn"),
        ({"llama__rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier is not known here"),
        ({"llama__rope__scaling__attn_factor": 1.2}, "attn_factor is 1.2.*, must be 1.0"),
    ],
)
def test_what_changes_the_arithmetic_is_refused_by_name(tmp_path, model, metadata, message):
    with pytest.raises(ModelError, match=message):
        values(tmp_path, model, **metadata)


@pytest.mark.parametrize("architecture", ["gemma2", "phi3", "llama4", "mamba"])
def test_another_architecture_is_refused_by_name(tmp_path, model, architecture):
    with pytest.raises(ModelError, match=f"general.architecture is {architecture}, must be llama or qwen2 or qwen3"):
        values(tmp_path, model, architecture)


def test_a_window_of_unknown_layers_is_refused(tmp_path, model):
    with pytest.raises(ModelError, match=r"qwen2.attention.sliding_window is 64, must be absent"):
        values(tmp_path, model, "qwen2", qwen2__attention__sliding_window=64)


def test_a_file_without_embedding_is_refused(tmp_path, model):
    metadata = {"llama.context_length": 1, "llama.embedding_length": 1, "llama.block_count": 1}
    metadata |= {"llama.feed_forward_length": 1, "llama.attention.head_count": 1}
    path = write(tmp_path / "m.gguf", "llama", metadata, {"output_norm.weight": np.ones(4, np.float32)})
    with pytest.raises(ModelError, match=r"has no matrix token_embd.weight"):
        config_values(GGUFFile.open(path))
