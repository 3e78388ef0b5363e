"""Every program says of an interrupt that it was one, and has idle threads sleep soon, from before torch is there."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lychee import options

ROOT = Path(__file__).parents[1]
INTERRUPTED = """import os, signal
print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
os.kill(os.getpid(), signal.SIGINT)
import lost"""


@pytest.fixture
def start(tmp_path):
    """Runs a module where the first to import torch is interrupted there, and what it prints is how threads wait."""

    def call(*command, **environment):
        (tmp_path / "torch.py").write_text(INTERRUPTED)
        without = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        return subprocess.run(
            [sys.executable, "-m", *command],
            env=without | {"PYTHONPATH": path} | environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background ignore it
        )

    return call


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["lychee.run"], "lychee run"),
        (["lychee", "run"], "lychee run"),
        (["lychee", "serve"], "lychee serve"),
        (["lychee.check"], "lychee check"),
        (["lychee", "--help"], "lychee run"),
        (["bench.rows"], "bench"),
        (["bench.studies"], "bench"),
    ],
)
def test_an_interrupt_while_modules_are_imported_is_one_line(start, command, name):
    ran = start(*command)
    assert (ran.returncode, ran.stderr) == (130, f"{name}: interrupted\n")
    assert ran.stdout == "2000\n"


@pytest.mark.parametrize("command", [["lychee", "run"], ["bench.rows"]])
def test_threads_wait_as_the_user_says(start, command):
    assert start(*command, GOMP_SPINCOUNT="7").stdout == "7\n"


def test_an_interrupt_while_a_command_works_is_one_line(capsys):
    def interrupted():
        raise KeyboardInterrupt

    assert options.exit_code("lychee run", interrupted) == 130
    assert capsys.readouterr() == ("", "lychee run: interrupted\n")
