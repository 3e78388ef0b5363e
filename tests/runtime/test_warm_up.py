"""Warming up compiles what generation needs and changes nothing that is generated."""

import pytest

from lychee import LLM, SamplingParams, demo
from lychee.backends.cpu import jit
from tests.conftest import DEVICE

PARAMS = SamplingParams(max_tokens=24, temperature=0)


@pytest.fixture(scope="module")
def llm():
    made = LLM(demo.TARGET, demo.DRAFT, device=DEVICE)
    made.warm_up(PARAMS)
    made.warm_up(PARAMS, native=True)
    return made


def test_metrics_start_after_it(llm):
    assert llm.metrics().rounds == 0


def test_a_request_after_it_compiles_nothing(llm, monkeypatch):
    monkeypatch.setattr(jit, "compiled", lambda text, target: pytest.fail("a kernel was compiled"))
    for native in (False, True):
        llm.generate(["Once upon a time", "The sea is"], PARAMS, native=native)


def test_neither_does_one_that_hits_the_prefix_cache(llm, monkeypatch):
    prompts = [list(range(5, 5 + length)) for length in (200, 208)]
    for prompt in prompts:
        llm.generate([prompt], PARAMS)
    monkeypatch.setattr(jit, "compiled", lambda text, target: pytest.fail("a kernel was compiled"))
    for prompt in (*prompts, [*prompts[0][:100], *[7] * 30], [*prompts[0], *[7] * 100]):
        assert llm.generate([prompt], PARAMS)[0].outputs[0].stats.cached_tokens > 90


def test_text_is_the_same_without_it(llm):
    cold = LLM(demo.TARGET, demo.DRAFT, device=DEVICE)
    want, got = (one.generate(["Once upon a time"], PARAMS)[0].outputs[0].token_ids for one in (cold, llm))
    assert got == want


def test_it_is_refused_while_a_request_runs(llm):
    stream = llm.stream(["Once upon a time"], PARAMS)
    next(iter(stream))
    with pytest.raises(RuntimeError, match="requests are running"):
        llm.warm_up()
    stream.close()


@pytest.mark.parametrize("sizes", [{"max_model_len": 4}, {"max_model_len": 12}, {"num_blocks": 1}, {"num_blocks": 3}])
@pytest.mark.parametrize("tree", ["chain", "auto", "4,2"])
def test_what_has_no_room_is_left_cold(tree, sizes):
    small = LLM(demo.TARGET, demo.DRAFT, {"tree": tree}, device=DEVICE, **sizes)
    small.warm_up(PARAMS)
    params = SamplingParams(max_tokens=2, temperature=0)
    assert len(small.generate([[5, 6]], params)[0].outputs[0].token_ids) == 2
