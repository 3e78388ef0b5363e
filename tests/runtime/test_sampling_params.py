"""Parameters: vLLM's names, and a sentence for every value that is not allowed."""

from dataclasses import replace

import numpy as np
import pytest

from lychee.runtime.config import EngineConfig, SpeculativeConfig
from lychee.runtime.sampling_params import ParameterError, SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", True), ("max_new_tokens", 0),
        ("min_tokens", -1), ("min_tokens", 17), ("temperature", -0.1), ("temperature", float("nan")),
        ("temperature", float("inf")), ("temperature", "hot"), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -2),
        ("top_k", 1.5), ("min_p", -0.1), ("min_p", 1.5), ("seed", 2**63), ("seed", 1.0), ("n", 0),
        ("presence_penalty", 3.0), ("frequency_penalty", -3.0), ("repetition_penalty", 0.0), ("logprobs", -1),
        ("stop", [""]), ("stop", [1]), ("bad_words", "word"), ("stop_token_ids", [-1]), ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: float("nan")}), ("logit_bias", {1: float("inf")}),
    ],
)  # fmt: skip
def test_a_value_that_is_not_allowed_is_refused_by_name(name, value):
    with pytest.raises(ParameterError, match=name):
        SamplingParams(**{name: value})


def test_top_p_zero_says_what_is_allowed():
    with pytest.raises(ParameterError, match=r"top_p is 0.0, must be a finite number above 0 and at most 1"):
        SamplingParams(top_p=0.0)


def test_max_new_tokens_is_an_alias_that_survives_replace():
    params = SamplingParams(max_new_tokens=7)
    assert params.max_tokens == 7
    assert replace(params, temperature=0.5).max_tokens == 7


def test_numpy_scalars_are_numbers():
    params = SamplingParams(top_k=np.int64(3), temperature=np.float32(0.5), max_tokens=np.int32(2))
    assert (params.top_k, params.temperature, params.max_tokens) == (3, 0.5, 2)
    assert type(params.top_k) is int


def test_none_stands_for_empty_as_in_vllm():
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None, logit_bias=None) == SamplingParams()


def test_aliases_that_disagree_are_refused():
    with pytest.raises(ParameterError, match="max_tokens is 3"):
        SamplingParams(max_tokens=3, max_new_tokens=9)
    with pytest.raises(ParameterError, match="max_draft_len is 4"):
        SpeculativeConfig(max_draft_len=4, num_speculative_tokens=3)


def test_a_stop_string_alone_is_one_stop():
    assert SamplingParams(stop="end").stop == ("end",)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_draft_len", -1), ("max_draft_len", 33), ("num_speculative_tokens", 33), ("acceptance_threshold", 1.5),
        ("adaptive", "yes"), ("fallback_sampling", None), ("verify", "always"),
    ],
)  # fmt: skip
def test_a_speculative_value_that_is_not_allowed_is_refused_by_name(name, value):
    with pytest.raises(ParameterError, match=name):
        SpeculativeConfig(**{name: value})


def test_speculative_config_aliases():
    assert not SpeculativeConfig(adaptive_max_draft_len=False).adaptive
    fixed = SpeculativeConfig(num_speculative_tokens=3)
    assert (fixed.max_draft_len, fixed.adaptive) == (3, False)
    assert SpeculativeConfig.from_json('{"max_draft_len": 8}').max_draft_len == 8


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not JSON"), ("[1]", "JSON object"), ('{"max_draft": 4}', "has 'max_draft'")]
)
def test_speculative_config_json_is_checked(text, message):
    with pytest.raises(ParameterError, match=message):
        SpeculativeConfig.from_json(text)


@pytest.mark.parametrize(
    "name", ["block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len"]
)
def test_engine_sizes_are_positive(name):
    with pytest.raises(ParameterError, match=name):
        EngineConfig(**{name: 0})
