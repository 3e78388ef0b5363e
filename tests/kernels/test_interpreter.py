"""The launches run in Triton's interpreter too: the debugger of kernels, and a second opinion on the compiler."""

import os
import subprocess
import sys

import pytest
import torch

from lychee.kernels import OPS

BREAK = """
import os
os.environ["TRITON_INTERPRET"] = "1"
from hypothesis import Phase, settings
from lychee.kernels import OPS
from tests.kernels import interpret
settings.register_profile("no shrinking", phases=[Phase.generate])
settings.load_profile("no shrinking")
shipped = OPS["swiglu"].launch

def broken(y, gate, up):
    shipped(y, gate, up)
    y[-1, -1] += 1

OPS["swiglu"].launch = broken
raise SystemExit(interpret.main())
"""


def python(*arguments):
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def report():
    return python("-m", "tests.kernels.interpret")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_op_interpreted_equals_its_reference(report, name, dtype):
    lines = report.stdout.splitlines()
    assert f"{name} {dtype}: passed" in lines, report.stdout + report.stderr


def test_a_wrong_launch_is_found_there():
    done = python("-c", BREAK, "swiglu", "rms_norm")
    assert done.returncode == 2, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.endswith(": failed")] == [
        f"swiglu {dtype}: failed" for dtype in (torch.float32, torch.float16)
    ]
