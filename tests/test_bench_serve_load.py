"""The load script, at a small size: no token lost or mixed up, nothing kept, a clean end under SIGTERM."""

import pytest

from bench import serve_load


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "seconds"), [(8, 2), (200, 180)], ids=["small", "large"])
def test_load_loses_no_token_and_keeps_nothing(clients, seconds):
    found = serve_load.run(clients, seconds, prompts=4 if clients < 50 else 30)
    assert serve_load.sound(found) == []
    assert set(found["exchanges"]) == set(serve_load.KINDS)
    assert found["ends_under_sigterm"].get("done", 0) > 0
    assert set(found["statuses"]) <= {"200", "400", "404", "503", "None"}


def test_memory_that_grows_in_the_second_half_is_wrong_and_caches_that_fill_in_the_first_are_not():
    whole = {"wrong": [], "tracebacks": 0, "ends_under_sigterm": {}, "exit_code": 0}
    for memory, sound in (([300, 400, 480, 500, 500, 501, 500, 502, 501, 503], True), ([*range(400, 500, 10)], False)):
        found = whole | {"memory_mib": memory, "grown_mib_in_second_half": serve_load.grown(memory)}
        assert (serve_load.sound(found) == []) is sound
