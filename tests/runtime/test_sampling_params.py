"""Parameters: vLLM's names, and a sentence for every value that is not allowed."""

from dataclasses import replace

import numpy as np
import pytest

from lychee import LLM
from lychee.runtime.checks import ParameterError
from lychee.runtime.config import EngineConfig, SpeculativeConfig
from lychee.runtime.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", True), ("max_new_tokens", 0),
        ("min_tokens", -1), ("min_tokens", 17), ("temperature", -0.1), ("temperature", float("nan")),
        ("temperature", float("inf")), ("temperature", "hot"), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -2),
        ("top_k", 1.5), ("min_p", -0.1), ("min_p", 1.5), ("seed", 2**63), ("seed", 1.0), ("n", 0),
        ("presence_penalty", 3.0), ("frequency_penalty", -3.0), ("repetition_penalty", 0.0), ("logprobs", -1),
        ("stop", [""]), ("stop", [1]), ("bad_words", "word"), ("stop_token_ids", [-1]), ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: float("nan")}), ("logit_bias", {1: float("inf")}), ("ignore_eos", "no"), ("ignore_eos", 1),
        ("skip_special_tokens", None), ("include_stop_str_in_output", "yes"), ("top_k", True), ("logprobs", True),
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
        ("adaptive", "yes"), ("adaptive", 1), ("adaptive_max_draft_len", "no"), ("fallback_sampling", None),
        ("verify", "always"), ("max_draft_len", True), ("num_speculative_tokens", False), ("node_budget", True),
        ("tree", 4), ("tree", ["4"]),
    ],
)  # fmt: skip
def test_a_speculative_value_that_is_not_allowed_is_refused_by_name(name, value):
    with pytest.raises(ParameterError, match=name):
        SpeculativeConfig(**{name: value})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SamplingParams(top_kk=1), "SamplingParams has no 'top_kk'; did you mean top_k"),
        (
            lambda: SamplingParams(bogus=1),
            "SamplingParams has no 'bogus', may have bad_words, frequency_penalty, .*top_p$",
        ),
        (lambda: SpeculativeConfig(adaptiv=True), "SpeculativeConfig has no 'adaptiv'; did you mean adaptive"),
        (
            lambda: SpeculativeConfig.parse({"max_draft": 4}),
            "speculative_config has no 'max_draft'; did you mean max_dra",
        ),
        (lambda: EngineConfig(blocks=4), "EngineConfig has no 'blocks'; did you mean num_blocks"),
        (lambda: LLM("m", draft="d"), "LLM has no 'draft'; did you mean draft_quant or draft_model"),
        (lambda: LLM("m", bogus=1), "LLM has no 'bogus', may have block_size, device, .*target_quant$"),
        (lambda: LLM("m", block_size=True), "block_size is True, must be an integer"),
        (lambda: LLM("m", dtype=["float32"]), "dtype is \\['float32'\\], must be auto"),
    ],
)
def test_an_unknown_name_is_refused_with_those_closest_to_it(make, message):
    with pytest.raises(ParameterError, match=message):
        make()


FIXED = "num_speculative_tokens is 5"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_speculative_tokens": 5, "adaptive": True}, f"adaptive is True, must be left out where {FIXED}"),
        ({"num_speculative_tokens": 5, "adaptive_max_draft_len": True}, f"adaptive is True, .* {FIXED}"),
        ({"num_speculative_tokens": 5, "acceptance_threshold": 0.4}, f"acceptance_threshold is 0.4, .* {FIXED}"),
        ({"num_speculative_tokens": 5, "max_draft_len": 16}, "max_draft_len is 16, must be left out"),
        ({"num_speculative_tokens": 5, "tree": "auto"}, "num_speculative_tokens is 5, must be left out where tree is"),
        ({"num_speculative_tokens": 2, "tree": "4,2"}, "num_speculative_tokens is 2, must be left out where tree is"),
        (
            {"num_speculative_tokens": 0, "fallback_sampling": False},
            "fallback_sampling is False, .* nothing is drafted",
        ),
        ({"max_draft_len": 16, "tree": "4,2"}, "max_draft_len is 16, must be left out where tree is '4,2'"),
        ({"max_draft_len": 0, "acceptance_threshold": 0.3}, "acceptance_threshold is 0.3, .* max_draft_len is 0"),
        ({"max_draft_len": 0, "adaptive": True}, "adaptive is True, must be left out where max_draft_len is 0"),
        ({"max_draft_len": 0, "tree": "auto"}, "tree is 'auto', must be left out where max_draft_len is 0"),
        ({"max_draft_len": 0, "fallback_sampling": False}, "fallback_sampling is False, .* nothing is drafted"),
        ({"adaptive": True, "tree": "4,2"}, "adaptive is True, must be left out where tree is '4,2'"),
        ({"adaptive": False, "tree": "auto"}, "adaptive is False, must be left out where tree is 'auto'"),
        ({"adaptive": False, "acceptance_threshold": 0.3}, "acceptance_threshold is 0.3, .* where adaptive is False"),
        ({"adaptive": True, "adaptive_max_draft_len": False}, "adaptive is True, must be left out where its alias"),
        (
            {"acceptance_threshold": 0.4, "tree": "auto"},
            "acceptance_threshold is 0.4, must be left out where tree is 'a",
        ),
        (
            {"acceptance_threshold": 0.4, "tree": "4,2"},
            "acceptance_threshold is 0.4, must be left out where tree is '4",
        ),
        ({"node_budget": 8, "tree": "chain"}, "node_budget is 8, must be left out without a tree"),
        ({"node_budget": 8, "num_speculative_tokens": 4}, "node_budget is 8, must be left out without a tree"),
        ({"node_budget": 11, "tree": "4,2"}, "tree is '4,2', must be a tree of at most 11 drafted nodes"),
        ({"verify": "coupled", "fallback_sampling": False}, "fallback_sampling is False, .* verify is 'coupled'"),
    ],
)
def test_fields_that_contradict_each_other_or_would_be_ignored_are_refused(given, message):
    with pytest.raises(ParameterError, match=message):
        SpeculativeConfig(**given)
    with pytest.raises(ParameterError):
        SpeculativeConfig.parse(given)


@pytest.mark.parametrize(
    "given",
    [
        {}, {"max_draft_len": 0}, {"max_draft_len": 16, "tree": "auto"}, {"adaptive": True, "tree": "auto"},
        {"num_speculative_tokens": 5, "adaptive": False}, {"tree": "4,2", "adaptive": False},
        {"tree": "4,2", "node_budget": 12}, {"tree": "4,2", "max_draft_len": 2}, {"tree": "4,2"},
        {"max_draft_len": 8, "adaptive": False}, {"acceptance_threshold": 0.2, "adaptive": True, "max_draft_len": 8},
        {"verify": "traversal", "fallback_sampling": False}, {"tree": "auto", "node_budget": 5},
    ],
)  # fmt: skip
def test_fields_that_agree_are_kept_and_survive_replace(given):
    config = SpeculativeConfig(**given)
    assert {name: getattr(config, name) for name in given} == given
    other = replace(config, verify="rejection")
    assert replace(other, verify=config.verify) == config


def test_defaults_are_filled_in_where_they_are_used():
    plain, tree = SpeculativeConfig(tree="chain"), SpeculativeConfig(tree="4,2")
    assert (plain.max_draft_len, plain.adaptive, plain.acceptance_threshold) == (16, True, 0.4)
    assert (tree.max_draft_len, tree.adaptive, tree.acceptance_threshold) == (2, False, None)
    planned = SpeculativeConfig()
    assert planned == SpeculativeConfig(tree="auto")
    assert (planned.max_draft_len, planned.adaptive, planned.acceptance_threshold) == (16, True, None)


def test_a_pool_has_no_more_slots_than_their_numbers_reach():
    assert EngineConfig(num_blocks=2**27 - 1).num_blocks == 2**27 - 1
    with pytest.raises(ParameterError, match="num_blocks is 134217728, must be at most 134217727 of block_size 16"):
        EngineConfig(num_blocks=2**27)
    with pytest.raises(ParameterError, match=r"block_size is 10000000000000, must be an integer in 1\.\.2147483647"):
        EngineConfig(block_size=10**13)


def test_speculative_config_aliases():
    assert not SpeculativeConfig(adaptive_max_draft_len=False).adaptive
    fixed = SpeculativeConfig(num_speculative_tokens=3)
    assert (fixed.max_draft_len, fixed.adaptive) == (3, False)
    assert SpeculativeConfig.from_json('{"max_draft_len": 8}').max_draft_len == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("[1]", "JSON object"), ('{"verify": "auto", "verify": "coupled"}', "has verify twice")],
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
