"""Every op compiles for the GPUs it is meant for, with none present, and its kernels keep within their budgets."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from lychee.compiler import shipped, static_check
from lychee.kernels import OPS, sass

ARCHS = ("sm_80", "sm_90")
DTYPES = ("float32", "float16", "bfloat16")
BROKEN = """
import triton
import triton.language as tl
from lychee.compiler import static_check
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
raise SystemExit(static_check.main(["--op", ops, "--arch", "sm_80", "--dtype", "float16"]))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs Python where kernels compile; the interpreter, once chosen, cannot be left in this process."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), env.get("PYTHONPATH")]))

    def run(*arguments):
        return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=1800)

    return run


def compiled(run, folder, *flags):
    """The records of all kernels, and what is printed; the architectures at once, each in its process."""

    def one(arch):
        file = folder / f"{arch}.json"
        result = run("-m", "lychee.compiler.static_check", "--arch", arch, "--json", str(file), *flags)
        return json.loads(file.read_text()) if file.exists() else [], result

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(one, ARCHS))
    return [record for records, _ in found for record in records], [result for _, result in found]


@pytest.fixture(scope="module")
def usual(run, tmp_path_factory):
    return compiled(run, tmp_path_factory.mktemp("usual"), "--quick")


def test_all_that_is_usual_compiles_within_its_budgets(usual):
    for result in usual[1]:
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", OPS)
def test_op_compiles_without_spills(usual, name):
    kernels = [usage for usage in usual[0] if usage["op"] == name]
    assert {k["arch"] for k in kernels} == set(ARCHS)
    assert [k for k in kernels if not k["sizes"].get("int8_cache") and (k["spilled"] or k["local_accesses"])] == []
    assert all(0 < k["registers"] <= 255 and 0 < k["occupancy"] <= 1 for k in kernels)


def test_products_use_tensor_cores_load_16_bytes_and_have_time_for_every_weight(usual):
    few = [k for k in usual[0] if k["sizes"].get("num_tokens", 16) == 16 and "grouped" not in k["sizes"]]
    decode = [k for k in few if k["op"] in ("linear", "linear_int8")]
    assert len(decode) >= 2 * 2 * len(ARCHS)
    for kernel in decode:
        assert "MMA" in kernel["mma"]
        assert 128 in kernel["load_bits"]
        assert 1 < kernel["per_weight"] <= {"linear": 15.6, "linear_int8": 7.8}[kernel["op"]]


def test_wide_products_are_wgmma_on_hopper(usual):
    heads = [k for k in usual[0] if k["arch"] == "sm_90" and k["op"].startswith("lm_head")]
    assert len(heads) == 3
    assert all(k["mma"].startswith("HGMMA") for k in heads)


@pytest.mark.slow
def test_every_shipped_configuration_compiles_within_its_budgets(run, tmp_path):
    records, results = compiled(run, tmp_path)
    for result in results:
        assert result.returncode == 0, result.stdout + result.stderr
    assert {(k["op"], k["dtype"], k["arch"]) for k in records} == {
        (o, d, a) for o in OPS for d in DTYPES for a in ARCHS
    }


def usage(**changes):
    known = {"op": "linear_int8", "kernel": "k", "dtype": "bfloat16", "arch": "sm_90", "registers": 64, "spilled": 0}
    known |= {"shared": 0, "num_warps": 4, "occupancy": 1.0, "mma": "HMMA.16816", "load_bits": (128,)}
    return static_check.Usage(**{**known, "local_accesses": 0, "per_weight": 7.0, **changes})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"spilled": 8}, "k spills: 8 bytes of stack, 0 accesses"),
        ({"local_accesses": 2}, "k spills: 0 bytes of stack, 2 accesses"),
        ({"mma": "-"}, "k multiplies without a tensor core"),
        ({"load_bits": (32, 64)}, "k has no load of 128 bits, but of (32, 64)"),
        ({"per_weight": 7.9}, "k takes 7.9 instructions a weight, at most 7.8"),
    ],
)
def test_a_kernel_over_a_budget_is_told(changes, sentence):
    configuration = shipped.Configuration("linear_int8", "bfloat16")
    assert shipped.broken_budgets(configuration, usage()) == []
    assert shipped.broken_budgets(configuration, usage(**changes)) == [sentence]


def test_what_is_known_is_told_as_that_until_it_gets_worse():
    configuration, sentence = (
        shipped.Configuration("linear_int4", "bfloat16"),
        "k takes {} instructions a weight, at most 4.1",
    )
    for taken, mark in ((13.0, "known: "), (16.5, "")):
        found = usage(op="linear_int4", load_bits=(64,), per_weight=taken)
        assert shipped.broken_budgets(configuration, found) == [mark + sentence.format(taken)]
    cached = shipped.Configuration("attention", "bfloat16", (("int8_cache", 1),))
    spilling = usage(op="attention", spilled=80, local_accesses=4)
    assert shipped.broken_budgets(cached, spilling) == ["known: k spills: 80 bytes of stack, 4 accesses"]
    plain = shipped.Configuration("attention", "bfloat16")
    assert shipped.broken_budgets(plain, spilling) == ["k spills: 80 bytes of stack, 4 accesses"]


def test_the_main_loop_is_the_one_that_multiplies_and_its_loads_are_read():
    text = """
        /*0000*/                   LDG.E.64 R2, desc[UR4][R2.64] ;
.L_x_0:
        /*0010*/              @!P0 IADD3 R1, R1, 0x1, RZ ;
        /*0020*/               @P1 BRA `(.L_x_0) ;
.L_x_1:
        /*0030*/                   LDGSTS.E.BYPASS.128 [R27], desc[UR10][R6.64], P5 ;
        /*0040*/              @!P3 LDG.E.U16 R60, desc[UR10][R12.64] ;
        /*0050*/                   LDG.E R60, desc[UR10][R12.64] ;
        /*0060*/                   HMMA.16816.F32.BF16 R16, R16, R8, R12 ;
        /*0070*/              @!P4 BRA `(.L_x_1) ;
        /*0080*/                   STL [R1], R2 ;
        /*0090*/                   BRA `(.L_x_2) ;
.L_x_2:
        /*00a0*/                   EXIT ;
    """
    code = sass.Code.parse(text.replace("\n        ", "\n"))
    assert len(code.opcodes) == 11
    assert code.loops == ((1, 2), (3, 7))
    assert code.main_loop[0] == "LDGSTS.E.BYPASS.128"
    assert code.load_bits == (16, 32, 128)
    assert code.mma == "HMMA.16816.F32.BF16"
    assert code.local_accesses == 1


@pytest.mark.parametrize(
    ("capability", "registers", "shared", "warps", "share"),
    [
        (80, 32, 0, 4, 1.0),
        (80, 128, 0, 4, 0.25),
        (90, 32, 100_000, 4, 0.125),
        (90, 32, 0, 1, 0.5),
        (89, 255, 0, 4, 1 / 6),
    ],
)
def test_occupancy_is_what_registers_shared_memory_and_warps_leave(capability, registers, shared, warps, share):
    assert sass.occupancy(capability, registers, shared, warps) == pytest.approx(share)


def test_failures_are_reported_together_and_fail_the_run(run, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    result = run(str(script))
    assert result.returncode == 1
    for line in (
        r"wrong_shapes +failed for float16 on sm_80: CompilationError: ",
        r"greedy +failed for float16 on sm_80: CompileError: _greedy_kernel takes \d+ bytes of shared memory, at",
        r"launches_nothing +failed for float16 on sm_80: CompileError: the launch starts no Triton kernel",
        r"rms_norm +rms_norm +fp16 +sm_80 ",
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
        static_check.main(flags)
    assert sentence in capsys.readouterr().err


def test_interpreted_kernels_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit, match="2"):
        static_check.main([])
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err
