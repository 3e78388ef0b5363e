"""LLM: streams of several threads, what it refuses, and what it says when a model is broken."""

import itertools
import math
import re
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import lychee
from lychee import LLM, ParameterError, SamplingParams
from lychee.runtime.metrics import RequestStats
from tests.factory import make_model_dir
from tests.runtime.pairs import PROMPT, PROMPTS, greedy, make_llm, model_dir, shared_llm


def test_threads_share_one_llm():
    llm = make_llm(draft="near")
    want = [llm.generate(p, greedy(max_tokens=12))[0].outputs[0].token_ids for p in PROMPTS]
    with ThreadPoolExecutor(4) as threads:
        got = list(threads.map(lambda p: llm.generate(p, greedy(max_tokens=12))[0].outputs[0].token_ids, PROMPTS * 4))
    assert got == want * 4
    pool = llm.engine().scheduler.pool
    assert pool.num_free == pool.num_blocks


def test_interleaved_streams_get_their_own_chunks():
    llm = make_llm(draft="near")
    want = [llm.generate(p, greedy(max_tokens=12))[0].outputs[0].text for p in PROMPTS[:2]]
    first, second = (llm.stream(p, greedy(max_tokens=12)) for p in PROMPTS[:2])
    texts = ["", ""]
    for a in first:
        texts[0] += a.text
        texts[1] += "".join(chunk.text for chunk in itertools.islice(second, 1))
    texts[1] += "".join(chunk.text for chunk in second)
    assert texts == want


def test_a_stream_ends_with_its_context():
    llm = make_llm()
    with llm.stream(PROMPT, greedy(max_tokens=100)) as stream:
        next(stream)
    assert stream.outputs()[0].outputs[0].finish_reason == "abort"
    assert llm.engine().idle


def test_a_closed_llm_holds_neither_weights_nor_kv():
    with make_llm(draft="near") as llm:
        llm.generate(PROMPTS, greedy())
        llm.generate(PROMPTS, greedy(), native=True)
        engines = llm.engine(), llm.engine(native=True)
        held = [engine.kv.storage for engine in engines] + [engines[0].drafter.kv.storage]
        held += [llm.target.weights.embed, llm.draft.weights.layers[0].down]
        refs = [weakref.ref(tensor) for tensor in held]
        del engines, held
        assert all(ref() is not None for ref in refs)
    assert [ref() for ref in refs] == [None] * len(refs)


@pytest.mark.parametrize(
    "use",
    [
        lambda llm: llm.generate(PROMPT),
        lambda llm: llm.stream(PROMPT),
        lambda llm: llm.chat([{"role": "user", "content": "hi"}]),
        lambda llm: llm.check(PROMPT),
        lambda llm: llm.engine(),
        lambda llm: llm.metrics(),
        lambda llm: llm.warm_up(),
        lambda llm: llm.memory_plan(),
        lambda llm: llm.tokenizer,
    ],
)
def test_a_closed_llm_says_that_it_is(use):
    llm = make_llm()
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        use(llm)


def test_closing_an_llm_ends_its_streams():
    llm = make_llm(draft="near")
    running, waiting = (llm.stream(PROMPT, greedy(max_tokens=100)) for _ in range(2))
    first = next(running)
    llm.close()
    assert list(running) == []
    completion = running.outputs()[0].outputs[0]
    assert (completion.finish_reason, completion.token_ids) == ("abort", first.token_ids)
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        next(waiting)


def test_what_an_llm_never_had_is_still_an_attribute_error():
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'generte'"):
        make_llm().generte  # noqa: B018


def test_the_readme_names_every_field_of_the_statistics():
    said = (Path(lychee.__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    table = said[said.index("| `stats` | |") : said.index("`stats.report()` has most")]
    names = {field.name for field in fields(RequestStats)} | {"ttft_s", "e2e_s"}
    assert set(re.findall(r"`(\w+)`", table)) == names | {"stats"}


@pytest.mark.parametrize("chunks", [0, 1])
def test_a_closed_stream_has_aborted_its_requests_even_before_its_first_chunk(chunks):
    llm = make_llm()
    stream = llm.stream(PROMPTS, greedy(max_tokens=100, n=2))
    for _ in range(chunks):
        next(stream)
    stream.close()
    assert {c.finish_reason for output in stream.outputs() for c in output.outputs} == {"abort"}
    assert list(stream) == []
    assert llm.engine().idle


def test_a_completed_stream_stays_complete_when_it_is_closed():
    with shared_llm().stream(PROMPT, greedy(max_tokens=3)) as stream:
        list(stream)
    assert stream.outputs()[0].outputs[0].finish_reason == "length"


def test_a_bad_prompt_among_several_is_named_by_its_number():
    with pytest.raises(ParameterError, match="prompt 3: prompt has 256 tokens, must leave room"):
        shared_llm().generate([[5], [6], [5] * 256])
    with pytest.raises(ParameterError, match=r"^prompt has 256 tokens"):
        shared_llm().generate([[5] * 256])


def test_a_request_larger_than_the_pool_is_refused_before_it_streams():
    llm = make_llm(num_blocks=2)
    with pytest.raises(ParameterError, match="need 3 KV blocks of 16; the pool has 2"):
        llm.stream([[5] * 30], greedy(max_tokens=10))
    with pytest.raises(ParameterError, match="need 3 KV blocks of 16; the pool has 2"):
        llm.check([5] * 30, greedy(max_tokens=10))
    llm.check([5] * 20, greedy(max_tokens=10))


def test_max_tokens_beyond_the_context_end_as_length_and_are_warned_of_once():
    llm = make_llm()
    with pytest.warns(UserWarning, match="max_tokens is 100, and max_model_len=256 leaves room for 6 after") as caught:
        outputs = llm.generate([[5] * 250] * 2, greedy(max_tokens=100))
    assert [(o.outputs[0].finish_reason, len(o.outputs[0].token_ids)) for o in outputs] == [("length", 6)] * 2
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.generate([[5] * 240], greedy(max_tokens=100))


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_whose_logits_are_not_finite_is_named(tmp_path, broken, role, temperature):
    path = make_model_dir(tmp_path / "broken")
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], broken)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(path) if role == "target" else LLM(model_dir(), path, {"tree": "chain"})
    with pytest.raises(ArithmeticError, match=f"the {role} model's logits are not finite"):
        llm.generate(PROMPT, SamplingParams(max_tokens=8, temperature=temperature, ignore_eos=True))
    assert llm.engine().idle


def test_time_to_first_token_starts_with_the_stream_not_with_the_engine(monkeypatch):
    clock = iter(range(100, 100000))
    llm = make_llm()
    monkeypatch.setattr("lychee.runtime.engine.time.perf_counter", lambda: next(clock))
    stream = llm.stream(PROMPT, greedy(max_tokens=2))
    for _ in range(1000):
        next(clock)
    list(stream)
    assert stream.outputs()[0].outputs[0].stats.ttft_s < 100


def test_kv_memory_is_counted_by_blocks_in_use():
    llm = make_llm(num_blocks=1000)
    before = llm.metrics().peak_memory_bytes
    llm.generate(PROMPT, greedy(max_tokens=40))
    used = llm.engine().scheduler.pool.max_used
    assert 0 < used < 10
    assert llm.metrics().peak_memory_bytes > before


@pytest.mark.parametrize("prompts", [np.array([1, 40, 41]), torch.tensor([1, 40, 41]), [1, 40, 41]])
def test_token_ids_come_as_a_list_an_array_or_a_tensor(prompts):
    assert shared_llm().generate(prompts, greedy(max_tokens=1))[0].prompt_token_ids == (1, 40, 41)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: LLM("no/such/model"),
            "model is 'no/such/model', must be .* a name that `lychee get` knows: smollm2, ",
        ),
        (lambda: LLM(None), "model is None, must be a model directory"),
        (lambda: LLM(model_dir(), "org/draft/x"), "draft_model is 'org/draft/x', must be a model directory"),
        (lambda: LLM(model_dir(), model_dir(), "x"), "speculative_config is 'x', must be"),
        (
            lambda: LLM(model_dir(), gpu_memory_utilization=0.5),
            "LLM has no 'gpu_memory_utilization', may have block_si",
        ),
        (lambda: shared_llm().generate("a", native="no"), "native is 'no', must be True or False"),
        (lambda: LLM(model_dir(), device="cpu:7"), "device is 'cpu:7', must be cpu, cuda, or cuda:N"),
        (lambda: shared_llm().generate(b"abc"), "prompts is b'abc', must be a prompt or a list"),
    ],
)
def test_a_wrong_argument_is_refused_in_a_sentence(make, message):
    with pytest.raises(ParameterError, match=message):
        make()


def test_the_package_exports_its_interface():
    assert all(getattr(lychee, name) for name in lychee.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = lychee.Engine


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"num_blocks": 10**8},
            r"num_blocks is 100000000, must be at most \d+: KV takes [\d,.]+ GiB, activations take [\d,.]+ GiB, and ",
        ),
        (
            {"block_size": 10**9},
            r"block_size is 1000000000, must be less: a block takes [\d,.]+ GiB, activations take .*, and half",
        ),
    ],
)
def test_a_pool_that_no_memory_holds_is_refused(sizes, message):
    llm = LLM(model_dir(), device="cpu", **sizes)
    with pytest.raises(ParameterError, match=message):
        llm.generate("a", SamplingParams(max_tokens=1))


def test_a_device_may_be_torch_s_own():
    assert LLM(model_dir(), device=torch.device("cpu")).device == torch.device("cpu")
