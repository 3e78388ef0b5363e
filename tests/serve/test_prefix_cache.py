"""The prefix cache of a service: shared within an API key and a salt, and never beyond."""

import pytest

from tests.runtime.pairs import make_llm
from tests.serve.running import serving

KEYS = ("first-key", "second-key")
PROMPT = [5 + i % 13 for i in range(49)]  # three full blocks, and a token


@pytest.fixture
def hits():
    """Asks, and returns how many tokens were found."""
    with serving(make_llm("near"), api_keys=KEYS) as running:

        def ask(key, **given):
            metrics = running.service.engine.engine.metrics
            before = metrics.prefix_cache_hits
            body = {"model": "lychee-demo", "prompt": PROMPT, "max_tokens": 2} | given
            status, _, answer = running.ask("POST", "/v1/completions", body, {"authorization": f"Bearer {key}"})
            assert status == 200, answer
            return metrics.prefix_cache_hits - before

        yield ask


def test_another_key_never_hits(hits):
    assert [hits(key) for key in (*KEYS, *KEYS)] == [0, 0, 48, 48]


def test_another_salt_of_the_same_key_never_hits(hits):
    asked = [
        (KEYS[0], {}),
        (KEYS[0], {"cache_salt": "a"}),
        (KEYS[0], {"cache_salt": "a"}),
        (KEYS[1], {"cache_salt": "a"}),
    ]
    assert [hits(key, **given) for key, given in asked] == [0, 0, 48, 0]


def test_completions_of_one_call_share_the_prompt(hits):
    assert hits(KEYS[0], n=3) == 96
