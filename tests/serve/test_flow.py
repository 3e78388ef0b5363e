"""Clients that go away, read slowly or break; an engine that fails; the end of the service."""

import http.client
import json
import socket
import threading
import time

import pytest

from lychee.serve.async_engine import QueueLimits
from tests.runtime.pairs import make_llm
from tests.serve.running import CODE, MODEL, reference, serving

LONG = {"model": MODEL, "prompt": CODE, "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def raw(address, body, receive_buffer=None):
    """A socket on which a completion has been asked for."""
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(address)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + data)
    return connection


def begun(running, jobs=1):
    until = time.perf_counter() + 30
    while len(running.service.engine.jobs) < jobs or any(job.waiting for job in running.service.engine.jobs):
        assert time.perf_counter() < until
        time.sleep(0.001)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_request(stream):
    with serving() as running:
        connection = raw(running.address, LONG | {"stream": stream, "n": 4})
        begun(running)
        connection.close()
        running.settled()
        entry = next(e for e in running.log if e["path"] == "/v1/completions")
        assert entry["client"] == "gone"
        assert set(entry["finish_reasons"]) == {"abort"}
        assert b'finished_reason="abort",model_name="lychee-demo"} 4.0' in running.service.metrics.text()


@pytest.mark.slow
def test_a_client_that_reads_nothing_is_cut_off_and_holds_nothing_meanwhile():
    """Logprobs make answers large: megabytes, where a socket's buffers hold some hundred kilobytes."""
    body = LONG | {"stream": True, "n": 3, "logprobs": 20}
    with serving(stall_s=0.5) as running:
        connection = raw(running.address, body, receive_buffer=4096)
        begun(running)
        assert running.complete(max_tokens=24, temperature=0)[1]["choices"][0]["text"] == text(24)
        running.settled(60)  # also of its connection:
        until = time.perf_counter() + 20
        while len(running.service.transports):
            assert time.perf_counter() < until, "the connection is kept"
            time.sleep(0.01)
        connection.close()


def text(max_tokens):
    return reference(CODE, temperature=0.0, max_tokens=max_tokens)[0].text


def test_a_slow_reader_gets_every_token():
    with serving() as running:
        connection = raw(running.address, LONG | {"stream": True, "max_tokens": 200}, receive_buffer=4096)
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            time.sleep(0.002)
            data += connection.recv(700)
        connection.close()
        events = [line[6:] for line in data.decode().split("\n") if line.startswith("data: {")]
        joined = "".join(json.loads(event)["choices"][0]["text"] for event in events)
        assert joined == reference(CODE, temperature=0.0, max_tokens=200, ignore_eos=True)[0].text
        running.settled()


def fail_next_step(running):
    def step():
        raise RuntimeError("the weather is bad")

    running.service.engine.engine.step = step


def test_an_engine_that_fails_is_said_and_the_next_request_is_answered():
    with serving(make_llm("near")) as running:
        answers = []
        body = LONG | {"prompt": "a", "max_tokens": 240, "n": 4}

        def ask(stream):
            answers.append(running.ask("POST", "/v1/completions", body | {"stream": stream}))

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        begun(running, 2)
        fail_next_step(running)
        for thread in threads:
            thread.join(60)
        statuses = sorted(status for status, _, _ in answers)
        assert statuses == [200, 500]  # the stream had begun
        for status, _, answer in answers:
            last = answer if status == 500 else json.loads(answer.split("data: ")[-1])
            assert last["error"]["code"] == "engine_failed"
            assert "weather" not in json.dumps(last)
        assert running.complete(prompt="a", max_tokens=3)[0] == 200
        assert running.ask("GET", "/ready")[0] == 200
        assert b"lychee:engine_restarts_total" in running.service.metrics.text()
        running.settled()


def test_a_request_that_comes_while_the_engine_is_made_anew_waits_for_it():
    with serving(make_llm("near")) as running:
        stepper, begun_anew, go_on = running.service.engine._stepper, threading.Event(), threading.Event()
        renew = stepper._renew

        def slow():
            begun_anew.set()
            go_on.wait(60)
            return renew()

        stepper._renew = slow
        fail_next_step(running)
        assert running.complete(prompt="a", max_tokens=3)[0] == 500
        assert begun_anew.wait(60)
        answers = []
        thread = threading.Thread(target=lambda: answers.append(running.complete(prompt="a", max_tokens=3)[0]))
        thread.start()
        time.sleep(0.2)
        assert answers == []
        go_on.set()
        thread.join(60)
        assert answers == [200]


def two_begun(running):
    """Answers, and the threads that wait for them: of a long request and of a stream, both begun."""
    answers = []
    threads = [
        threading.Thread(
            target=lambda s=s: answers.append(running.ask("POST", "/v1/completions", LONG | {"stream": s}))
        )
        for s in (False, True)
    ]
    for thread in threads:
        thread.start()
    begun(running, 2)
    return answers, threads


def test_draining_refuses_new_requests_and_lets_open_ones_end():
    with serving() as running:
        answers, threads = two_begun(running)
        running.server.handle_exit(15, None)
        until = time.perf_counter() + 20
        while not running.service.engine.draining:
            assert time.perf_counter() < until
            time.sleep(0.001)
        for method, path, body in (("POST", "/v1/completions", LONG), ("GET", "/ready", None)):
            status, headers, answer = running.ask(method, path, body)
            assert (status, answer["error"]["code"]) == (503, "draining")
            assert headers["retry-after"] == "5"
        assert running.ask("GET", "/health")[0] == 200
        for thread in threads:
            thread.join(60)
        expected = reference(CODE, temperature=0.0, max_tokens=400, ignore_eos=True)[0].text
        for _, _, answer in answers:
            if isinstance(answer, dict):
                assert answer["choices"][0]["text"] == expected
            else:
                assert answer.endswith("data: [DONE]\n\n")
        assert len(answers) == 2


def test_what_does_not_end_in_time_is_told_so_when_the_service_ends():
    with serving(drain_s=0.0) as running:
        answers, threads = two_begun(running)
        running.server.handle_exit(15, None)
        for thread in threads:
            thread.join(60)
        assert sorted(status for status, _, _ in answers) == [200, 503]
        for status, _, answer in answers:
            last = answer if status == 503 else json.loads(answer.split("data: ")[-1])
            assert last["error"]["code"] == "draining"


def test_a_connection_serves_one_request_after_another(service):
    connection = http.client.HTTPConnection(*service.address, timeout=60)
    for body, status in ((LONG | {"max_tokens": 3}, 200), (LONG | {"stream": True, "max_tokens": 3}, 200), ({}, 400)):
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == status
        answer.read()
    connection.close()


def test_metrics_show_what_the_engine_and_its_readers_saw():
    with serving(make_llm("same"), QueueLimits()) as running:
        for speculative in (True, False):
            assert running.complete(prompt="a", max_tokens=20, ignore_eos=True, speculative=speculative)[0] == 200
        running.settled()
        _, headers, shown = running.ask("GET", "/metrics")
        assert headers["content-type"].startswith("text/plain")
        values = dict(line.rsplit(" ", 1) for line in shown.splitlines() if line.startswith("lychee:"))

        def value(name, channel=None, **labels):
            given = {**({"channel": channel} if channel else {}), **labels, "model_name": MODEL}
            inside = ",".join(f'{key}="{given[key]}"' for key in sorted(given))
            return float(values[f"lychee:{name}{{{inside}}}"])

        metrics = running.service.engine.engine.metrics
        assert value("spec_decode_num_drafts_total", "speculative") == metrics.drafted_at[0] > 0
        assert value("spec_decode_num_draft_tokens_total", "speculative") == metrics.drafted
        assert value("spec_decode_num_accepted_tokens_total", "speculative") == metrics.accepted
        first = value("spec_decode_num_accepted_tokens_per_pos_total", "speculative", position=0)
        assert first == metrics.accepted_at[0]
        assert value("native_rounds_total", "native", reason="off") == 19
        for channel in ("speculative", "native"):
            assert value("request_success_total", channel, finished_reason="length") == 1
            assert value("time_to_first_token_seconds_count", channel) == 1
            assert value("inter_token_latency_seconds_count", channel) == 19
            assert value("e2e_request_latency_seconds_count", channel) == 1
            assert value("generation_tokens_total", channel) == 20
            assert value("num_requests_running", channel) == value("num_requests_waiting", channel) == 0
        assert value("kv_cache_usage_perc") == 0
        assert value("prefix_cache_queries_total") == metrics.prefix_cache_queries > 0
        assert value("prefix_cache_hits_total") == metrics.prefix_cache_hits
