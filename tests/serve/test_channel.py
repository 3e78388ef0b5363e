"""The accelerated channel: a share of users, the same ones each time, changed while requests run; no answer changes."""

import math
import threading

import pytest

from lychee.serve.channel import Channel
from tests.runtime.pairs import greedy, make_llm, shared_llm
from tests.serve.running import MODEL, serving

ADMIN = {"authorization": "Bearer the-admin"}


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_a_share_of_users_is_taken_within_binomial_error(share):
    channel, many = Channel(share), 20000
    taken = sum(channel.takes(f"user {i}") for i in range(many))
    assert abs(taken - share * many) <= 5 * math.sqrt(many * share * (1 - share))


def test_a_user_stays_in_its_channel_and_a_growing_share_keeps_its_users():
    users = [f"user {i}" for i in range(2000)]
    small, large = ({u for u in users if Channel(share).takes(u)} for share in (0.1, 0.3))
    assert small == {u for u in users if Channel(0.1).takes(u)}
    assert small < large


def channel_of(running, **given):
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2} | given
    _, headers, _ = running.ask("POST", "/v1/completions", body)
    return running.logged(headers["x-request-id"])["channel"]


def test_the_share_changes_while_requests_run_and_each_is_answered_as_by_native_decoding():
    expected = shared_llm().generate(["a"], greedy(max_tokens=200))[0].outputs[0].text
    with serving(make_llm("near"), admin_key="the-admin") as running:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        answers = []
        threads = [
            threading.Thread(target=lambda: answers.append(running.ask("POST", "/v1/completions", body)))
            for _ in range(6)
        ]
        for i, thread in enumerate(threads):
            thread.start()
            status, _, told = running.ask("POST", "/admin/speculation", {"share": i % 2}, ADMIN)
            assert (status, told["share"], told["guard"]["state"]) == (200, i % 2, "off")
        for thread in threads:
            thread.join(60)
        assert [(status, answer["choices"][0]["text"]) for status, _, answer in answers] == [(200, expected)] * 6
        running.ask("POST", "/admin/speculation", {"share": 0.5}, ADMIN)
        channels = {user: channel_of(running, user=user) for user in map(str, range(12))}
        assert set(channels.values()) == {"speculative", "native"}
        assert channels == {user: channel_of(running, user=user) for user in channels}
        running.ask("POST", "/admin/speculation", {"share": 0}, ADMIN)
        assert channel_of(running) == "native"
        assert channel_of(running, speculative=True) == "speculative"
        assert running.ask("GET", "/admin/speculation", headers=ADMIN)[2]["share"] == 0.0
        for share in (-0.1, 1.1, "1", None):
            status, _, answer = running.ask("POST", "/admin/speculation", {"share": share}, ADMIN)
            assert (status, answer["error"]["param"]) == (400, "share")
        running.settled()


def test_the_admins_key_alone_opens_the_endpoint_and_nothing_else():
    with serving(make_llm(), api_keys=("a-key",), admin_key="the-admin") as running:
        for headers in ({}, {"authorization": "Bearer a-key"}, {"authorization": "Bearer "}):
            assert running.ask("POST", "/admin/speculation", {"share": 1}, headers)[0] == 401
        assert running.ask("GET", "/v1/models", headers=ADMIN)[0] == 401
        assert running.ask("GET", "/admin/speculation", headers=ADMIN)[2]["share"] == 0.0  # it has no draft
        assert running.ask("POST", "/admin/speculation", {"share": 1}, ADMIN)[0] == 400
