"""Steps of a GPU session do not depend on each other, stop in time and keep what they measured; checks catch faults."""

import json
import os

import pytest
import torch

from bench import gpu_checks, gpu_session
from bench.gpu_session import Step
from lychee.kernels import OPS

SCRIPT = """
import json, pathlib, sys, time
file = pathlib.Path(sys.argv[sys.argv.index("--json") + 1])
file.write_text(json.dumps([1, 2]))
print("said", *sys.argv[1:])
{rest}
"""


@pytest.fixture
def session(tmp_path, monkeypatch):
    """Runs steps that are scripts, by name; returns the exit code and the outcomes by step."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    def call(limit=60.0, **rests):
        for name, rest in rests.items():
            (tmp_path / f"{name}_step.py").write_text(SCRIPT.format(rest=rest))
        steps = tuple(Step(name, f"{name}_step", ("big",), ("small",), limit) for name in rests)
        monkeypatch.setattr(gpu_session, "STEPS", steps)
        code = gpu_session.main(["--dry-run", "--out", str(tmp_path / "out"), "--steps", ",".join(rests)])
        record = json.loads((tmp_path / "out" / "session.json").read_text())
        return code, {step["step"]: step for step in record["steps"]}

    return call


def test_a_step_that_fails_costs_the_others_nothing(session, capsys):
    code, steps = session(bad="raise SystemExit('no such kernel')", good="")
    assert code == 1
    assert (steps["bad"]["verdict"], steps["bad"]["records"]) == ("FAILED", 2)
    assert (steps["good"]["verdict"], steps["good"]["code"]) == ("passed", 0)
    assert steps["good"]["said"] == "said small --json " + steps["good"]["said"].rsplit(" ", 1)[1]
    assert "FAILED" in capsys.readouterr().out


def test_a_step_that_hangs_is_stopped_and_what_it_wrote_is_kept(session):
    code, steps = session(limit=2.0, hangs="time.sleep(600)", good="")
    assert code == 1
    assert (steps["hangs"]["verdict"], steps["hangs"]["records"]) == ("out of time", 2)
    assert steps["good"]["verdict"] == "passed"


def test_without_a_gpu_only_a_dry_run_is_possible(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu_session.main([])
    assert "torch finds no CUDA device; --dry-run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu_session.main(["--dry-run", "--steps", "all"])
    assert "--steps has 'all', must be of kernels, rows" in capsys.readouterr().err


def test_all_steps_together_take_no_more_than_eight_minutes():
    assert sum(step.seconds for step in gpu_session.STEPS) <= gpu_session.SECONDS <= 480


def records(capsys, *argv):
    code = gpu_checks.main([*argv, "--small"])
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_rows_are_checked_bit_by_bit_and_a_batch_that_changes_one_is_caught(capsys, monkeypatch):
    code, found = records(capsys, "rows")
    assert (code, len(found)) == (0, 18)
    right = OPS["linear"]
    wrong = lambda **given: right(**given) * (1 + 1e-6 * (len(given["x"]) > 1))  # noqa: E731
    wrong.sample, wrong.typical, wrong.axes, wrong.contract = right.sample, right.typical, right.axes, right.contract
    monkeypatch.setitem(OPS, "linear", wrong)
    code, found = records(capsys, "rows")
    assert code == 1
    assert {record["op"] for record in found if not record["ok"]} == {"linear"}


def test_launches_are_timed(capsys):
    code, (found,) = records(capsys, "launches")
    assert code == 0
    assert 0 < found["host_us"] <= found["whole_us"]


@pytest.mark.slow
def test_a_dry_run_of_every_step_passes(tmp_path):
    assert gpu_session.main(["--dry-run", "--out", str(tmp_path)]) == 0
    steps = json.loads((tmp_path / "session.json").read_text())["steps"]
    assert [step["step"] for step in steps] == [step.name for step in gpu_session.STEPS]
    assert all(step["records"] > 0 for step in steps)
    kernels = json.loads((tmp_path / "kernels.json").read_text())
    assert {record["op"] for record in kernels} == set(OPS)
    peak, *timings = json.loads((tmp_path / "rooflines.json").read_text())
    assert peak["peak"]["bytes_per_s"] > 0
    assert {timing["format"] for timing in timings} == {"bf16", "int8", "int4", "lm_head", "lm_head_int8", "-"}
    assert all(timing["of_roofline"] > 0 for timing in timings)
