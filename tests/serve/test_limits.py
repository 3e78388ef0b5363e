"""Keys, sizes, rates and queues: who is refused, with which status, and that nobody else notices."""

import http.client
import json
import threading

import pytest

from lychee.serve.async_engine import QueueLimits
from lychee.serve.config import RateLimits
from lychee.serve.edge import key_name
from tests.runtime.pairs import make_llm, slow_llm
from tests.serve.running import CODE, MODEL, serving

KEYS = ("first-key", "second-key")
EVERY_PATH = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("POST", "/tokenize"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
]


@pytest.fixture(scope="module")
def guarded():
    with serving(make_llm("near"), api_keys=KEYS) as running:
        yield running


def bearer(key):
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(("method", "path"), EVERY_PATH)
def test_with_keys_everything_but_health_needs_one(guarded, method, path):
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1} if method == "POST" else None
    for headers in ({}, bearer("wrong"), bearer(""), {"authorization": KEYS[0]}, {"x-api-key": KEYS[0]}):
        status, given, answer = guarded.ask(method, path, body, headers)
        assert status == 401
        assert answer["error"]["code"] == "invalid_api_key"
        assert given["www-authenticate"] == "Bearer"
    for key in KEYS:
        assert guarded.ask(method, path, body, bearer(key))[0] != 401


@pytest.mark.parametrize(
    "path",
    [
        "/health/../v1/models",
        "//health",
        "/health/",
        "/v1/models?path=/health",
        "/v1/models#/health",
        "/%2e%2e/health/x",
        "/healthz",
        "/HEALTH",
        "/nothing",
        "http://other/v1/models",
    ],
)
def test_no_spelling_of_a_path_gets_past_the_key(guarded, path):
    assert guarded.ask("GET", path)[0] == 401


def test_health_is_open_to_all(guarded):
    assert guarded.ask("GET", "/health")[::2] == (200, {"status": "alive"})
    assert guarded.ask("GET", "/health?x=1")[0] == 200


def test_a_header_given_twice_is_no_key(guarded):
    connection = http.client.HTTPConnection(*guarded.address, timeout=30)
    connection.putrequest("GET", "/v1/models")
    connection.putheader("authorization", f"Bearer {KEYS[0]}")
    connection.putheader("authorization", f"Bearer {KEYS[1]}")
    connection.endheaders()
    assert connection.getresponse().status == 401
    connection.close()


def test_the_log_shows_who_asked_and_neither_keys_nor_prompts(guarded):
    body = {"model": "lychee-demo", "prompt": "the secret", "max_tokens": 2}
    _, headers, _ = guarded.ask("POST", "/v1/completions", body, bearer(KEYS[0]))
    entry = guarded.logged(headers["x-request-id"])
    assert (entry["key"], entry["status"], entry["path"]) == (key_name(KEYS[0]), 200, "/v1/completions")
    assert (entry["completion_tokens"], entry["channel"], entry["finish_reasons"]) == (2, "speculative", ["length"])
    assert not any(word in json.dumps(guarded.log) for word in (*KEYS, "secret"))


def test_prompts_are_logged_where_that_is_asked_for():
    with serving(make_llm(), log_prompts=True) as running:
        body = {"model": MODEL, "prompt": "the secret", "max_tokens": 1}
        _, headers, _ = running.ask("POST", "/v1/completions", body)
        assert running.logged(headers["x-request-id"])["prompts"] == ["the secret"]


def test_admin_paths_are_not_there_without_an_admin_key(guarded):
    assert guarded.ask("GET", "/admin/channel", headers=bearer(KEYS[0]))[0] == 404


# Bodies


def test_a_body_that_is_too_large_is_refused_before_it_is_read(service):
    connection = http.client.HTTPConnection(*service.address, timeout=30)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", str(1 << 40))
    connection.endheaders()
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["error"]["code"]) == (413, "body_too_large")
    connection.close()


def test_a_chunked_body_that_is_too_large_is_refused_while_it_comes(service):
    connection = http.client.HTTPConnection(*service.address, timeout=30)
    chunks = (b" " * 65536 for _ in range(17))
    connection.request("POST", "/v1/completions", chunks, {"content-type": "application/json"}, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_a_body_that_does_not_come_is_not_waited_for_for_ever():
    with serving(make_llm(), body_s=0.2) as running:
        connection = http.client.HTTPConnection(*running.address, timeout=30)
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", "10")
        connection.endheaders()
        assert connection.getresponse().status == 408
        connection.close()
        running.settled()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[]",
        b"null",
        b'"x"',
        b'{"model": NaN}',
        b'{"temperature": Infinity, "model": "lychee-demo", "prompt": "a"}',
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
        b'{"model": "lychee-demo", "prompt": "\\ud800"}',
        b'{"model": "\\ud800", "prompt": "a"}',
        b'{"model": "lychee-demo", "prompt": "a", "stop": "\\ud800"}',
        b'{"model": "lychee-demo", "prompt": "a", "\\ud800": 1}',
        b'{"model": "lychee-demo", "prompt": "a", "max_tokens": 1e400}',
        b'{"model": "lychee-demo", "prompt": "a", "max_tokens": true}',
    ],
)
def test_bodies_that_make_no_sense_are_refused_in_the_apis_form(service, body):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        status, _, answer = service.ask("POST", path, body)
        assert status in (400, 404)
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert len(answer["error"]["message"]) <= 600


def test_only_bodies_that_are_declared_json_are_read(service):
    """A page of another site may send others without the browser asking us first."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        assert service.ask("POST", "/v1/completions", b"{}", {"content-type": kind})[0] == 415


def test_other_origins_are_not_let_in_unless_named(service):
    headers = {"origin": "https://page.example", "access-control-request-method": "POST"}
    status, given, _ = service.ask("OPTIONS", "/v1/completions", headers=headers)
    assert status == 405
    assert "access-control-allow-origin" not in given
    with serving(make_llm(), cors_origins=("https://page.example",), api_keys=KEYS) as running:
        status, given, _ = running.ask("OPTIONS", "/v1/completions", headers=headers)
        assert (status, given["access-control-allow-origin"]) == (200, "https://page.example")
        other = running.ask("OPTIONS", "/v1/completions", headers=headers | {"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other[1]
        assert running.ask("GET", "/v1/models", headers=headers)[0] == 401


def test_what_is_not_there_is_said_in_the_apis_form(service):
    status, _, answer = service.ask("GET", "/v2/completions")
    assert (status, answer["error"]["code"]) == (404, "not_found")
    status, _, answer = service.ask("GET", "/v1/completions")
    assert (status, answer["error"]["code"]) == (405, "method_not_allowed")


def test_control_strings_in_prompts_are_text(service):
    _, _, plain = service.ask("POST", "/tokenize", {"prompt": "</s>"})
    assert plain["tokens"][0] == 1
    assert 2 not in plain["tokens"]
    _, _, chat = service.ask("POST", "/tokenize", {"messages": [{"role": "user", "content": "</s>"}]})
    assert 2 not in chat["tokens"]


def test_tokenize_gives_the_ids_of_a_completions_prompt(service):
    _, _, answer = service.ask("POST", "/tokenize", {"prompt": CODE})
    assert answer["count"] == len(answer["tokens"]) == service.complete(max_tokens=1)[1]["usage"]["prompt_tokens"]
    assert answer["max_model_len"] == 512
    for body in ({}, {"prompt": "a", "messages": []}, {"prompt": ""}, {"prompt": "a", "model": "b"}):
        assert service.ask("POST", "/tokenize", body)[0] in (400, 404)


# Rates


def test_requests_a_minute_are_limited_by_key():
    with serving(make_llm(), api_keys=KEYS, rates=RateLimits(requests_per_minute=3)) as running:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
        for _ in range(3):
            assert running.ask("POST", "/v1/completions", body, bearer(KEYS[0]))[0] == 200
        status, headers, answer = running.ask("POST", "/v1/completions", body, bearer(KEYS[0]))
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
        assert 1 <= int(headers["retry-after"]) <= 60
        assert running.ask("POST", "/v1/completions", body, bearer(KEYS[1]))[0] == 200


def test_tokens_a_minute_count_prompts_and_what_may_be_generated():
    with serving(make_llm(), rates=RateLimits(tokens_per_minute=100)) as running:
        assert running.complete(prompt=[5] * 10, max_tokens=20, n=3)[0] == 200  # 70
        status, answer = running.complete(prompt=[5] * 10, max_tokens=40)
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        assert running.complete(prompt=[5] * 10, max_tokens=10)[0] == 200
        status, answer = running.complete(prompt=[5] * 10, max_tokens=100)
        assert (status, answer["error"]["param"]) == (400, "max_tokens")  # it never fits


def test_requests_at_a_time_are_limited_by_key():
    with serving(make_llm(), rates=RateLimits(concurrency=1)) as running:
        slow = threading.Thread(
            target=running.complete, kwargs={"prompt": "a", "max_tokens": 240, "n": 8, "ignore_eos": True}
        )
        slow.start()
        running.opened(1)
        status, answer = running.complete(prompt="a", max_tokens=1)
        assert (status, answer["error"]["code"]) == (429, "concurrency_limit")
        slow.join()
        assert running.complete(prompt="a", max_tokens=1)[0] == 200
        running.settled()


def test_a_full_queue_and_a_wait_that_is_too_long_are_said_with_their_status():
    long = {"prompt": "a", "max_tokens": 240, "ignore_eos": True}
    with serving(slow_llm(max_num_seqs=1), QueueLimits(max_queue=1, queue_s=0.1)) as running:
        first, answers = threading.Thread(target=running.complete, kwargs=long), []
        first.start()
        running.opened(1)
        second = threading.Thread(target=lambda: answers.append(running.complete(**long)))
        second.start()
        running.opened(2)
        status, headers, answer = running.ask("POST", "/v1/completions", {"model": MODEL, **long})
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        assert headers["retry-after"] == "1"
        first.join()
        second.join()
        assert answers[0][0] == 503
        assert answers[0][1]["error"]["code"] == "queue_timeout"
        running.settled()


def test_what_can_never_fit_the_pool_is_refused_at_once_by_name():
    with serving(make_llm(num_blocks=4)) as running:
        status, answer = running.complete(prompt="a", max_tokens=100)
        assert (status, answer["error"]["param"]) == (400, "max_tokens")
        assert answer["error"]["code"] == "context_length_exceeded"
        assert running.complete(prompt="a", max_tokens=50)[0] == 200
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "ignore_eos": True}
        status, _, answer = running.ask("POST", "/v1/chat/completions", chat)
        assert (status, answer["usage"]["total_tokens"]) == (200, 64)  # as much as the pool has
        running.settled()


def test_a_request_that_takes_too_long_ends_and_is_not_sent_again_by_the_client():
    long = {"model": MODEL, "prompt": "a", "max_tokens": 240, "n": 8, "ignore_eos": True}
    with serving(make_llm(), QueueLimits(request_s=0.05)) as running:
        status, headers, answer = running.ask("POST", "/v1/completions", long)
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
        assert headers["x-should-retry"] == "false"
        status, _, text = running.ask("POST", "/v1/completions", long | {"stream": True})
        assert status == 200
        *_, last = [line for line in text.split("\n\n") if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
        running.settled()


CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_chat_without_a_template_is_refused_with_what_to_do(service, monkeypatch, path):
    monkeypatch.setattr(service.service, "chat", None)
    status, _, body = service.ask("POST", path, CHAT)
    error = body["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", "messages")
    assert "model 'lychee-demo' has no chat template" in error["message"]
    assert "/v1/completions, or start the server with --chat-template FILE" in error["message"]


def test_what_does_not_fit_the_context_has_the_clients_code_for_it(service):
    long = "long " * 2000
    answers = [
        service.complete(prompt=long),
        service.complete(max_tokens=10000),
        service.ask("POST", "/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": long}]})[::2],
        service.ask("POST", "/v1/chat/completions", CHAT | {"max_tokens": 10000})[::2],
    ]
    found = [(status, body["error"]["code"], body["error"]["param"]) for status, body in answers]
    code = "context_length_exceeded"
    assert found == [(400, code, param) for param in ("prompt", "max_tokens", "messages", "max_tokens")]
