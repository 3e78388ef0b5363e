"""The backend is there for Triton to find, and changes nothing for anybody until it is switched on, where it is."""

import os
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.backends import backends
from triton.backends.compiler import Language
from triton.runtime.driver import driver

from lychee.backends.cpu import activated
from lychee.backends.cpu.compiler import CPUBackend


@triton.jit
def add_one_kernel(x_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) + 1, mask=offs < n)


@pytest.fixture
def active(monkeypatch):
    """Sets Triton's active driver; what it was comes back afterwards."""
    monkeypatch.setattr(driver, "_active", driver._active)
    return lambda value: setattr(driver, "_active", value)


def python(code, **env):
    """The output of a fresh Python, without a GPU in sight."""
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**clean, "CUDA_VISIBLE_DEVICES": "", **env}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_triton_finds_the_backend_and_loads_nothing_heavy():
    code = (
        "import sys, triton; print('lychee_cpu' in triton.backends.backends, {'torch', 'llvmlite'} & set(sys.modules))"
    )
    assert python(code) == "True set()"


@pytest.mark.parametrize("module", ["", ".driver", ".compiler"])
def test_any_module_of_the_backend_can_be_imported_before_triton(module):
    code = f"import lychee.backends.cpu{module}\nimport triton\nprint('lychee_cpu' in triton.backends.backends)"
    assert python(code) == "True"


def test_without_a_gpu_triton_and_torch_are_as_if_we_were_not_installed():
    code = """
import lychee.kernels
from torch.utils._triton import has_triton
from triton.runtime.driver import driver
print(driver._active, driver._default, has_triton())
try:
    driver.active
except RuntimeError as error:
    print(error)
"""
    assert python(code) == "None None False\n0 active drivers ([]). There should only be one."
    assert "cpu" not in backends


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_torch_compile_works_as_before(tmp_path):
    code = """
import torch
from tests.kernels.add_kernel import add_kernel
x = torch.ones(64)
add_kernel[(2,)](x, x, 64, BLOCK=32)
softmax = torch.compile(lambda a: torch.softmax(a @ a + 1, -1))
a = torch.randn(32, 32)
print(torch.allclose(softmax(a), torch.softmax(a @ a + 1, -1), atol=1e-5))
"""
    assert python(code, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)) == "True"


@pytest.mark.parametrize("before", [None, SimpleNamespace(get_current_device=lambda: 3)], ids=["none", "another"])
def test_the_driver_that_was_active_is_active_again(active, before):
    active(before)
    with activated():
        assert driver.active.get_current_device() == "lychee_cpu"
        with activated():
            assert driver.active.get_current_device() == "lychee_cpu"
        assert driver.active.get_current_device() == "lychee_cpu"
    assert driver._active is before
    with pytest.raises(ZeroDivisionError), activated():
        1 / 0  # noqa: B018
    assert driver._active is before


def test_other_threads_keep_their_driver_meanwhile(active):
    active(SimpleNamespace(get_current_device=lambda: 3))
    seen = []
    with activated():
        thread = threading.Thread(target=lambda: seen.append(driver.active.get_current_device()))
        thread.start()
        thread.join()
    assert seen == [3]


def test_threads_take_turns(active):
    active(None)
    results = []

    def work():
        x = torch.zeros(100)
        for _ in range(20):
            with activated():
                add_one_kernel[(4,)](x, 100, BLOCK=32)
        results.append(x)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [x.unique().tolist() for x in results] == [[20.0]] * 4
    assert driver._active is None


@pytest.mark.parametrize("knobs", [{}, {"TRITON_BACKENDS_IN_TREE": "1"}], ids=["entry point", "in tree"])
def test_a_kernel_runs_however_triton_looks_for_backends(knobs):
    code = """
import torch
from lychee.backends.cpu import activated
from tests.backends.cpu.test_driver import add_one_kernel
x = torch.zeros(50)
with activated():
    add_one_kernel[(2,)](x, 50, BLOCK=32)
print(x.unique().tolist())
"""
    assert python(code, **knobs) == "[1.0]"


def test_options_for_gpus_are_accepted_and_change_no_code():
    x = torch.zeros(50)
    with activated():
        plain = add_one_kernel[(2,)]
        plain(x, 50, BLOCK=32)
        hashes = {
            add_one_kernel.run(x, 50, BLOCK=32, grid=(2,), warmup=True, **options).hash
            for options in ({}, {"num_warps": 8, "num_stages": 2}, {"maxnreg": 64, "num_ctas": 1}, {"waves_per_eu": 2})
        }
    assert len(hashes) == 1


def test_an_unknown_option_is_refused():
    with activated(), pytest.raises(KeyError, match="num_wraps"):
        add_one_kernel[(2,)](torch.zeros(50), 50, BLOCK=32, num_wraps=8)


def test_alignment_makes_no_variant():
    with activated():
        kernels = [
            add_one_kernel.run(x, n, BLOCK=32, grid=(2,), warmup=True)
            for x, n in ((torch.zeros(64), 64), (torch.zeros(64)[1:], 63))
        ]
    assert kernels[0].hash == kernels[1].hash
    assert "divisibility" not in kernels[0].asm["ttir"]


def test_every_stage_can_be_read():
    with activated():
        kernel = add_one_kernel.run(torch.zeros(50), 50, BLOCK=32, grid=(2,), warmup=True)
    assert "tt.func public @add_one_kernel" in kernel.asm["ttir"]
    assert kernel.asm["tir"].startswith("func add_one_kernel(")
    assert b"define void @run(ptr" in kernel.asm["llir"]


def test_gluon_kernels_are_refused():
    with activated():
        backend = CPUBackend(driver.active.get_current_target())
    with pytest.raises(RuntimeError, match="the CPU runs Triton kernels only"):
        backend.add_stages({}, backend.parse_options({}), Language.GLUON)


def test_sources_of_the_backend_and_the_cpu_are_part_of_every_key(monkeypatch):
    with activated():
        backend = CPUBackend(driver.active.get_current_target())
    before = backend.hash()
    monkeypatch.setattr("lychee.backends.cpu.compiler._sources", lambda: "other")
    assert backend.hash() != before


def test_the_autotuner_times_kernels_on_the_cpu():
    tuned = triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=["n"])(add_one_kernel)
    x = torch.zeros(64)
    with activated():
        tuned[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](x, 64)
        x.zero_()
        tuned[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](x, 64)
    assert x.unique().tolist() == [1.0]
    assert tuned.best_config.kwargs["BLOCK"] in (16, 32)
