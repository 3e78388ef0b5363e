"""With quantised weights and an int8 KV cache, speculation still gives the tokens of native decoding."""

from functools import cache
from itertools import chain, product

import pytest

from lychee import LLM, ModelError, ParameterError
from lychee.kernels.kv_int8 import cached_rows
from lychee.models.batch import Batch
from lychee.models.kv_cache import KVCache
from lychee.runtime.config import SpeculativeConfig
from tests.conftest import DEVICE
from tests.kernels.batches import bits
from tests.models.packers import gptq_packer, repack
from tests.runtime.pairs import PROMPTS, following, greedy, make_llm, model_dir, seeded, shown
from tests.runtime.test_engine_trees import RIGHT, Planned, TreeDrafter

BLOCK = 4
QUANTS, CACHES = (None, "int8", "int4"), ("auto", "int8")
PARAMS = [greedy(max_tokens=32), seeded(max_tokens=32, temperature=0.7)]
SOME = [("int8", None, "auto"), (None, "int4", "auto"), ("int8", "int8", "int8"), ("int4", "int4", "int8")]
ALL = [combination for combination in product(QUANTS, QUANTS, CACHES) if combination not in SOME]


@cache
def llm_of(target_quant, draft_quant, kv_cache_dtype, draft="near", **sizes):
    quants = {"target_quant": target_quant, "draft_quant": draft_quant, "kv_cache_dtype": kv_cache_dtype}
    return make_llm(draft, block_size=BLOCK, **quants, **sizes)


def results(outputs):
    return [shown(output.outputs[0]) for output in outputs]


def check_equal(llm, params):
    native = llm.generate(PROMPTS, params, native=True)
    llm.reset_metrics()
    together = llm.generate(PROMPTS, params)
    alone = [llm.generate([prompt], params)[0] for prompt in PROMPTS]
    assert results(together) == results(native) == results(alone)
    accepted = sum(output.outputs[0].stats.accepted for output in together)
    assert 0 < accepted < sum(output.outputs[0].stats.drafted for output in together)


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "seeded"])
@pytest.mark.parametrize("quants", SOME, ids=str)
def test_speculation_equals_native(quants, params):
    check_equal(llm_of(*quants), params)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 3, 8])
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "seeded"])
@pytest.mark.parametrize("quants", [*SOME, *ALL, ("int8-g32",) * 2 + ("int8",), ("int4-g32-zero",) * 2 + ("auto",)])
def test_speculation_equals_native_in_every_format_at_every_length(quants, params, length):
    check_equal(llm_of(*quants, config=SpeculativeConfig(num_speculative_tokens=length)), params)


@pytest.mark.parametrize("verify", ["auto", "coupled", "rejection"])
@pytest.mark.parametrize(("quant", "kv_cache_dtype"), [*product(("int8", "int4"), CACHES)])
def test_a_draft_equal_to_the_target_is_always_accepted(quant, kv_cache_dtype, verify):
    config = SpeculativeConfig(num_speculative_tokens=4, verify=verify)
    llm = llm_of(quant, quant, kv_cache_dtype, "same", config=config)
    for output in llm.generate(PROMPTS, greedy(max_tokens=40) if verify == "auto" else seeded(max_tokens=40)):
        stats = output.outputs[0].stats
        assert stats.accepted == stats.drafted > 20


def test_each_format_and_cache_has_logits_of_its_own():
    """So the cases above do quantise."""
    logprobs = []
    for quants in product(QUANTS, [None], CACHES):
        (output,) = llm_of(*quants).generate(PROMPTS[:1], greedy(max_tokens=1, logprobs=1))
        logprobs.append(output.outputs[0].logprobs[0].logprob)
    assert len(set(logprobs)) == len(logprobs)


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "seeded"])
@pytest.mark.parametrize("num_blocks", [11, 13, 19])
def test_sequences_preempted_with_an_int8_cache_resume_to_the_same_output(num_blocks, params):
    llm = make_llm("near", block_size=BLOCK, kv_cache_dtype="int8", target_quant="int8", num_blocks=num_blocks)
    params = type(params)(**vars(params) | {"max_tokens": 24})
    roomy = llm_of("int8", None, "int8").generate(PROMPTS, params)
    assert results(llm.generate(PROMPTS, params)) == results(roomy)
    assert llm.engine().metrics.preemptions > 0
    assert llm.engine().scheduler.pool.num_free == num_blocks


@pytest.fixture
def tree_llm():
    llm = make_llm("near", block_size=BLOCK, kv_cache_dtype="int8", target_quant="int4", draft_quant="int8")
    engine = llm.engine()
    engine.controller, engine.drafter.__class__ = Planned(), TreeDrafter
    return llm


@pytest.mark.parametrize("blur", [0, 2, 99])
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "seeded"])
def test_paths_off_the_trunk_give_the_tokens_of_native_decoding(tree_llm, params, blur):
    reference = tree_llm.generate(PROMPTS, params, native=True)
    tree_llm.engine().drafter.script, tree_llm.engine().drafter.blur = following(reference), blur
    assert results(tree_llm.generate(PROMPTS, params)) == results(reference)


def test_paths_off_the_trunk_leave_the_slots_that_a_prefill_writes(tree_llm):
    """A path's slots were written elsewhere and moved, each with its scales."""
    llm, engine, params = tree_llm, tree_llm.engine(), greedy(max_tokens=30)
    engine.drafter.script = following(llm.generate(PROMPTS[:1], params, native=True))
    stream = llm.stream(PROMPTS[0], params)
    next(stream)
    (seq,) = engine.scheduler.running
    start = seq.cached
    for _ in range(3):
        next(stream)
    assert seq.cached == start + 3 * len(RIGHT)
    kv, tokens = engine.kv, seq.tokens[: seq.cached]
    fresh = KVCache.allocate(llm.target.config, kv.num_blocks, BLOCK, kv.storage.dtype, DEVICE)
    batch = Batch.prefill([tokens], [0], [seq.blocks], BLOCK, DEVICE, [])
    llm.target.forward(batch, fresh)
    for moved, written in zip(chain(*kv.layers), chain(*fresh.layers), strict=True):
        rows = [cached_rows(cache, batch.slot_mapping.long(), llm.target.config.head_dim) for cache in (moved, written)]
        assert bits(rows[0]) == bits(rows[1])
    stream.close()


REFUSED = [
    ({"target_quant": "int3"}, r"target_quant is 'int3', must be None for .*, none for floats, int8, int8-g32, int4"),
    ({"target_quant": "int4-g16"}, r"target_quant is 'int4-g16', must be "),
    ({"target_quant": 8}, r"target_quant is 8, must be "),
    ({"draft_quant": "INT8", "draft": "near"}, r"draft_quant is 'INT8', must be "),
    ({"draft_quant": "int8"}, r"draft_quant is 'int8' without a draft_model"),
    ({"kv_cache_dtype": "int4"}, r"kv_cache_dtype is 'int4', must be auto \(the model's dtype\) or int8"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_an_unknown_format_is_refused_in_a_sentence(given, message):
    with pytest.raises(ParameterError, match=message) as refused:
        make_llm(**given)
    assert "\n" not in str(refused.value)


def test_a_quantised_directory_is_not_quantised_again(tmp_path):
    path = tmp_path / "gptq"
    path.mkdir()
    for file in model_dir().iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    repack(path, {"quant_method": "gptq", "bits": 4, "group_size": 32}, gptq_packer(4, 32, True, "gptq"))
    LLM(path, num_blocks=8, device=DEVICE)
    for quant in ("int8", "none"):
        with pytest.raises(ModelError, match="quantised") as refused:
            LLM(path, num_blocks=8, device=DEVICE, target_quant=quant)
        assert "\n" not in str(refused.value)
