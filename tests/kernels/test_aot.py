"""Every op compiles for the GPUs it is meant for, with none present, and spills no registers."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from lychee.kernels import OPS, aot

ARCHS = ("sm_80", "sm_90")
DTYPES = ("float32", "float16", "bfloat16")
SHIPPED_LINEARS = """
from lychee.kernels import aot
sizes = "num_tokens={},out_features={},in_features=2048,has_bias=1"
for dtype, widths in (("float32", [1024]), ("bfloat16", [1024, 4096, 12288])):
    for width in widths:
        for rows in (1, 17, 33):
            if aot.main(["--op", "linear", "--dtype", dtype, "--size", sizes.format(rows, width)]):
                raise SystemExit(1)
"""
BROKEN = """
import triton
import triton.language as tl
from lychee.kernels import aot
from lychee.kernels.op import op
from lychee.kernels.rms_norm import rms_norm_cost, rms_norm_reference, rms_norm_sample

@triton.jit
def _wrong_shapes_kernel(y_ptr):
    tl.store(y_ptr + tl.arange(0, 8), tl.arange(0, 16))

@triton.jit
def _greedy_kernel(y_ptr, x_ptr, hidden):
    offs = tl.arange(0, 64)
    tile = offs[:, None] * hidden + offs[None, :]
    acc = tl.zeros((64, 64), dtype=tl.float32)
    for start in range(0, hidden, 64):
        acc = tl.dot(tl.load(x_ptr + tile + start), tl.load(x_ptr + tile + start), acc)
    tl.store(y_ptr + tile, acc)

register = op(
    reference=rms_norm_reference,
    sample=rms_norm_sample,
    cost=rms_norm_cost,
    typical=dict(num_tokens=16, hidden=4096),
)

@register
def wrong_shapes(y, x, weight, eps):
    _wrong_shapes_kernel[(1,)](y)

@register
def greedy(y, x, weight, eps):
    _greedy_kernel[(1,)](y, x, x.shape[1], num_stages=32)

@register
def launches_nothing(y, x, weight, eps):
    y.copy_(x)

ops = "wrong_shapes,greedy,launches_nothing,rms_norm"
raise SystemExit(aot.main(["--op", ops, "--arch", "sm_80", "--dtype", "float16"]))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs Python where kernels compile; the interpreter, once chosen, cannot be left in this process."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), env.get("PYTHONPATH")]))

    def run(*arguments):
        return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=600)

    return run


def usages(printed):
    """The lines of the printed tables as dicts, keyed by the header; failures are left out."""
    header, *lines = (line.split() for line in printed.splitlines())
    return [dict(zip(header, line, strict=True)) for line in lines if line[1] != "failed" and line != header]


@pytest.fixture(scope="module")
def everything(run):
    """What all ops print and what goes wrong; the architectures at once, each in its process."""
    flags = ("-m", "lychee.kernels.aot", "--dtype", ",".join(DTYPES), "--arch")
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda arch: run(*flags, arch), ARCHS))
    return "".join(r.stdout for r in results), "".join(r.stderr for r in results)


@pytest.mark.parametrize("name", OPS)
def test_op_compiles_without_spills(everything, name):
    printed, errors = everything
    assert not re.search(rf"^{name} +failed.*", printed, re.MULTILINE), printed
    kernels = [usage for usage in usages(printed) if usage["op"] == name]
    assert {(k["arch"], k["dtype"]) for k in kernels} == {(a, d) for a in ARCHS for d in DTYPES}, errors
    assert [k for k in kernels if k["spilled"] != "0"] == []
    assert all(0 < int(k["registers"]) <= 255 for k in kernels)


def test_attention_in_a_window_compiles_without_spills(run):
    ops = ("--op", "attention,attention_prefill", "--dtype", "float32,bfloat16", "--size", "window=1000")
    result = run("-m", "lychee.kernels.aot", "--arch", ",".join(ARCHS), *ops)
    assert result.returncode == 0, result.stdout + result.stderr
    kernels = usages(result.stdout)
    assert len(kernels) == 3 * 2 * len(ARCHS)
    assert [k for k in kernels if k["spilled"] != "0"] == []


def test_every_shipped_linear_configuration_compiles_without_spills(run):
    result = run("-c", SHIPPED_LINEARS)
    assert result.returncode == 0, result.stdout + result.stderr
    kernels = usages(result.stdout)
    assert len(kernels) == 12 * len(ARCHS)
    assert [k for k in kernels if k["spilled"] != "0"] == []


def test_failures_are_reported_together_and_fail_the_run(run, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    result = run(str(script))
    assert result.returncode == 1
    for line in (
        r"wrong_shapes +failed for float16 on sm_80: CompilationError: ",
        r"greedy +failed for float16 on sm_80: CompileError: _greedy_kernel takes \d+ bytes of shared memory, at",
        r"launches_nothing +failed for float16 on sm_80: CompileError: the launch starts no Triton kernel",
        r"rms_norm +_rms_norm_kernel +float16 +sm_80 ",
        r"3 failed",
    ):
        assert re.search(f"^{line}", result.stdout, re.MULTILINE), result.stdout


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--arch", "sm_80,sm_12"], "--arch has 'sm_12', must be of sm_80"),
        (["--op", "conv"], "--op has 'conv', must be of "),
        (["--dtype", "int8"], "--dtype has 'int8', must be of float32, float16, bfloat16"),
        (["--size", "hidden=many"], "--size has hidden='many', must be AXIS=NUMBER of "),
        (["--size", "colour=1"], "--size has colour='1', must be AXIS=NUMBER of "),
    ],
)
def test_bad_flags_are_refused_in_a_sentence(capsys, flags, sentence):
    with pytest.raises(SystemExit, match="2"):
        aot.main(flags)
    assert sentence in capsys.readouterr().err


def test_interpreted_kernels_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit, match="2"):
        aot.main([])
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err
