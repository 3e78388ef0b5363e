"""The plan of an engine's memory: what is really allocated is within it, and what cannot fit is refused before."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from lychee import LLM, ParameterError, SamplingParams, demo
from lychee.inspect_cli import main as inspect
from lychee.models.config import ModelConfig
from lychee.models.kv_cache import KVCache
from lychee.models.meta import meta_llama
from lychee.runtime.config import EngineConfig, SpeculativeConfig
from lychee.runtime.memory_plan import plan
from lychee.runtime.tree import TreeShape

from .pairs import make_llm

SEVEN = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
SEVEN |= {"num_key_value_heads": 32}
ONE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
ONE |= {"num_key_value_heads": 4}
COMMON = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "rope_theta": 10000.0}
COMMON |= {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False}


def planned(models, shapes, **sizes):
    dtypes = [model.weights.dtype for model in models]
    return plan(models, dtypes, EngineConfig(**sizes), 4096, shapes, free=80 * 2**30)


def test_an_int8_draft_of_1b_adds_at_most_a_tenth_to_a_target_of_7b():
    target = meta_llama(ModelConfig.parse({**COMMON, **SEVEN}), torch.float16)
    draft = meta_llama(ModelConfig.parse({**COMMON, **ONE}), torch.float16, "int8")
    assert target.weights.num_bytes == 2 * 6_738_415_616
    for seqs in (1, 4):
        alone = planned([target], [TreeShape.chain(0)], max_num_seqs=seqs, num_blocks=256 * seqs)
        pair = planned([target, draft], [TreeShape.chain(5)], max_num_seqs=seqs, num_blocks=256 * seqs)
        assert 1.05 < pair.total / alone.total <= 1.10


def arenas(engine):
    every = [engine.target.buckets, engine.verifier.buckets]
    if engine.drafter is not None:
        every += [engine.drafter.compiled.buckets, engine.drafter.loop.buckets]
    found = {id(b): b._arena for b in every if b._arena is not None}
    return sum(len(arena) for arena in found.values())


@pytest.mark.parametrize("native", [True, False], ids=["native", "pair"])
def test_what_an_engine_owns_is_within_a_twentieth_of_its_plan(native):
    config = SpeculativeConfig(num_speculative_tokens=4)
    llm = LLM(demo.TARGET, demo.DRAFT, config, device="cpu", num_blocks=64, max_num_seqs=1)
    planned = llm.memory_plan(native)
    llm.warm_up(SamplingParams(temperature=0.0), native=native)
    engine = llm.engine(native)
    models = [engine.target.model] + ([] if native else [engine.drafter.model])
    caches = [engine.kv] + ([] if native else [engine.drafter.kv])
    weights = sum(t.nbytes for model in models for t in (*model.weights.tensors.values(), model.rope))
    kv = sum(cache.storage.nbytes for cache in caches)
    assert planned.kv == kv
    assert sum(model.weights for model in planned.models) == weights
    assert 0 < arenas(engine) <= planned.arenas
    assert abs(weights + kv + arenas(engine) - planned.total) <= planned.total / 20


def test_what_cannot_fit_is_refused_with_the_numbers_before_it_is_allocated():
    llm = make_llm(num_blocks=10**8)
    message = r"num_blocks is 100000000, must be at most \d+: KV takes [\d,.]+ GiB, activations take .* are free"
    with patch.object(KVCache, "allocate", wraps=KVCache.allocate) as allocate:
        with pytest.raises(ParameterError, match=message):
            llm.engine()
        assert all(call.args[1:3] == (1, 1) for call in allocate.mock_calls), "more than a slot was allocated"
    fitting = replace(llm.memory_plan(), num_blocks=16)
    assert fitting.checked() is fitting


def test_a_pool_of_no_size_given_has_what_the_longest_sequences_need():
    llm = make_llm(num_blocks=None, max_num_seqs=3, block_size=16)
    assert llm.memory_plan().num_blocks == 3 * llm.max_model_len // 16


def test_inspect_prints_the_plan_as_a_table(capsys):
    assert inspect(["--memory", "--draft"]) == 0
    printed = capsys.readouterr().out
    for part in ("target weights", "draft weights", "draft KV, 2048 blocks of 16 slots", "all ", "free beside"):
        assert part in printed
