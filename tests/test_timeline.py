"""lychee run --trace: every step and its phases as events that lie within each other, with the numbers of the run."""

import json
from itertools import pairwise

import pytest

from lychee import run


@pytest.fixture
def traced(tmp_path, capsys):
    """Events of a run, by engine, and the totals of its report."""

    def call(*argv):
        trace, report = tmp_path / "trace.json", tmp_path / "report.json"
        flags = ["--max-tokens", "12", "--temperature", "0", "--trace", str(trace), "--report", str(report), *argv]
        assert run.main(flags) == 0
        events = json.loads(trace.read_text())["traceEvents"]
        names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
        by_engine = {
            name: [event for event in events if event["ph"] == "X" and event["tid"] == row]
            for row, name in names.items()
        }
        return by_engine, json.loads(report.read_text())["runs"]

    return call


def steps(events):
    return [event for event in events if event["name"] in ("round", "prefill")]


def test_every_round_and_its_phases_are_events_and_emit_what_the_report_says(traced):
    engines, runs = traced("--prompt", "def f(x):")
    events = engines["speculative"]
    (request,) = runs["speculative"]["requests"]
    rounds = [event for event in events if event["name"] == "round"]
    assert len(rounds) == request["rounds"]
    assert sum(event["args"]["emitted"] for event in steps(events)) == request["output_tokens"]
    for name, times in (("plan", 0), ("verify", 0), ("draft", request["rounds_native"])):
        assert sum(event["name"] == name for event in events) == len(rounds) - times
    assert sum(event["args"]["rows"] for event in events if event["name"] == "verify") > len(rounds)


def test_phases_lie_within_their_round_and_rounds_apart(traced):
    events = traced("--prompt", "def f(x):", "--compare")[0]
    assert set(events) == {"native", "speculative"}
    for own in events.values():
        spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in steps(own))
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        for event in own:
            assert event["dur"] > 0
            end = event["ts"] + event["dur"]
            assert any(first <= event["ts"] and end <= last for first, last in spans)


def test_a_directory_that_is_not_there_is_refused(capsys):
    assert run.main(["--trace", "/nowhere/trace.json"]) == 2
    assert "--trace is /nowhere/trace.json, whose directory does not exist" in capsys.readouterr().err
