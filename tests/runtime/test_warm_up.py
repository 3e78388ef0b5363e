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
