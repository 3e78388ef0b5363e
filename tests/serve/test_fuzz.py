"""Whatever a body holds, the answer is in the API's form, is no server error, and the next request is answered."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lychee.serve.schemas import NEUTRAL, ChatBody, CompletionBody, TokenizeBody
from tests.serve.running import MODEL

FIELDS = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, *TokenizeBody.model_fields, *NEUTRAL})
NUMBERS = st.one_of(
    st.integers(-5, 50),
    st.sampled_from([0, -1, 2**31, 2**63, -(2**63), 2**64, 10**30, 1e-300, 1e308, -1e308, 5e-324, 0.1, 4095, 4096]),
    st.floats(allow_nan=False, allow_infinity=False),
)
TEXT = st.one_of(
    st.text(max_size=20),
    st.text(st.characters(), max_size=8),  # surrogates too
    st.sampled_from(
        [MODEL, "</s>", "<s>", "\x00", "\ufffd", "a" * 300, "def f(x):", "5", "4095", "-1", "user", "text"]
    ),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXT)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant", "tool", "x"]), "content": TEXT}),
    max_size=3,
)
LIKELY = {  # values that pass the first checks
    "model": st.just(MODEL),
    "max_tokens": st.integers(1, 6),
    "temperature": st.sampled_from([0, 1e-6, 0.5, 1, 1e6, 1e308, 5e-324]),
    "top_p": st.sampled_from([1e-9, 0.5, 1]),
    "top_k": st.sampled_from([-1, 0, 1, 5, 10**9, 10**30]),
    "min_p": st.sampled_from([0, 1e-9, 0.5, 1]),
    "n": st.integers(1, 3),
    "seed": st.sampled_from([0, -1, 2**63 - 1, -(2**63)]),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.sampled_from([0.01, 1, 100]),
    "logprobs": st.one_of(st.integers(0, 20), st.booleans()),
    "top_logprobs": st.integers(0, 20),
    "stop": st.one_of(TEXT, st.lists(TEXT, max_size=3)),
    "logit_bias": st.dictionaries(st.integers(0, 4100).map(str), st.floats(-100, 100), max_size=4),
    "min_tokens": st.integers(0, 6),
    "stop_token_ids": st.lists(st.integers(0, 4095), max_size=3),
    "bad_words": st.lists(TEXT, max_size=3),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "stream": st.booleans(),
    "speculative": st.booleans(),
    "user": TEXT,
    "stream_options": st.just({"include_usage": True}),
}
PROMPTS = st.one_of(TEXT, st.lists(st.integers(0, 4095), min_size=1, max_size=9), st.lists(TEXT, max_size=3))


@st.composite
def bodies(draw):
    """Mostly sound, with a few fields of which anything may be wrong."""
    path = draw(st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize"]))
    body = {"model": MODEL, "max_tokens": 3}
    if path == "/tokenize":
        del body["max_tokens"]
    body["messages" if "chat" in path else "prompt"] = draw(MESSAGES if "chat" in path else PROMPTS)
    names = draw(st.lists(st.sampled_from(sorted(LIKELY)), max_size=6))
    body |= {name: draw(LIKELY[name]) for name in names}
    if draw(st.booleans()):
        for name in draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=2)):
            body[name] = draw(VALUES)
    return path, body


def check(service, path, body):
    status, _, answer = service.ask("POST", path, json.dumps(body).encode())
    assert status in (200, 400, 404), (status, answer)
    if status != 200:
        error = answer["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
    elif isinstance(answer, str):  # a stream
        *events, done, end = answer.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        assert all("error" not in json.loads(event.removeprefix("data: ")) for event in events)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bodies())
def test_no_body_makes_a_server_error(service, case):
    check(service, *case)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bodies())
def test_no_body_makes_a_server_error_in_a_long_run(service, case):
    check(service, *case)


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=60))
def test_no_bytes_make_a_server_error(service, data):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        assert service.ask("POST", path, data)[0] == 400


@settings(max_examples=40, deadline=None)
@given(VALUES)
def test_no_json_makes_a_server_error(service, value):
    assert service.ask("POST", "/v1/completions", json.dumps(value).encode())[0] == 400
