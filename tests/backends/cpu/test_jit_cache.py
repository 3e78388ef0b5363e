"""Objects on disk: compiled once, verified when read, replaced when damaged, not needed to run."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.runtime.jit import JITFunction

from lychee.backends.cpu import jit
from lychee.backends.cpu.launch import loaded
from lychee.backends.cpu.target import Target, host
from lychee.kernels.kernel import kernel
from tests.kernels.add_kernel import add_kernel

TEXT = "define i32 @answer() {\n  ret i32 42\n}\n"
ENGINES = []  # what a test forgets: code that may still be in use
IN_A_PROCESS = """
from lychee.backends.cpu import compiler, jit
done = []
for owner, name in ((compiler, "make_llir"), (jit, "compiled")):
    def counted(*args, name=name, f=getattr(owner, name)):
        done.append(name)
        return f(*args)
    setattr(owner, name, counted)
from tests.backends.cpu.test_jit_cache import sum_of_kernel
print(sum_of_kernel(), sorted(done))
"""


def other_kernel(x, y, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offs, tl.load(x + offs, mask=offs < n), mask=offs < n)


def answer(text=TEXT):
    return ctypes.CFUNCTYPE(ctypes.c_int32)(jit.load(text, "answer"))()


@pytest.fixture
def forget(monkeypatch):
    """Makes this process as good as new."""

    def forget():
        ENGINES.append(jit._loaded)
        monkeypatch.setattr(jit, "_built", {})
        monkeypatch.setattr(jit, "_loaded", {})
        loaded.cache_clear()

    forget()
    yield forget
    ENGINES.append(jit._loaded)


@pytest.fixture
def directory(tmp_path, monkeypatch, forget):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path / "lychee_cpu"


@pytest.fixture
def compilations(monkeypatch):
    """The texts that were compiled."""
    texts = []
    compiled = jit.compiled
    monkeypatch.setattr(jit, "compiled", lambda text, target: (texts.append(text), compiled(text, target))[1])
    return texts


def sum_of_kernel():
    """4950.0, by way of a kernel that Triton has not seen in this process."""
    x = torch.arange(100.0)
    kernel(add_kernel.jit.fn)[(4,)](x, torch.zeros(100), 100, BLOCK=32)
    return x.sum().item()


def test_a_text_is_compiled_once(directory, compilations, forget):
    assert answer() == answer() == 42
    forget()
    assert answer() == 42
    assert compilations == [TEXT]


def test_nothing_is_left_beside_the_objects(directory):
    answer()
    assert [path.suffix for path in directory.iterdir()] == [".o"]


def test_the_key_is_all_that_the_object_depends_on(directory, monkeypatch):
    target = host()
    keys = {jit.object_key(TEXT, target), jit.object_key(TEXT + " ", target)}
    keys.add(jit.object_key(TEXT, Target(target.cpu, target.features + ",-avx512f", target.lanes)))
    keys.add(jit.object_key(TEXT, Target("x86-64", target.features, target.lanes)))
    monkeypatch.setattr(jit, "PIPELINE", "other")
    keys.add(jit.object_key(TEXT, target))
    assert len(keys) == 5


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:20],
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
        lambda data: b"not an object at all",
    ],
    ids=["empty", "head only", "short", "long", "one bit", "other"],
)
def test_a_damaged_object_is_compiled_anew_and_replaced(directory, compilations, forget, damage):
    answer()
    [path] = directory.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    forget()
    assert answer() == 42
    assert path.read_bytes() == whole
    assert len(compilations) == 2


def test_an_object_under_another_objects_name_is_not_taken(directory, forget):
    answer()
    other = TEXT.replace("42", "43")
    [path] = directory.iterdir()
    path.rename(directory / f"{jit.object_key(other, host())}.o")
    forget()
    assert answer(other) == 43


def test_without_a_directory_to_write_code_is_compiled_every_time(tmp_path, monkeypatch, compilations, forget):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert answer() == 42
    forget()
    assert answer() == 42
    assert len(compilations) == 2


def test_text_that_llvm_refuses_is_an_error(directory):
    with pytest.raises(RuntimeError, match="expected"):
        jit.load("define nonsense", "answer")
    assert not directory.exists()


def test_processes_that_write_the_same_object_do_not_disturb_each_other(tmp_path):
    code = f"""
import ctypes, sys
from lychee.backends.cpu import jit
for i in range(40):
    text = {TEXT!r}.replace("42", str(i))
    jit._built.clear(), jit._loaded.clear()
    for path in list(jit._directory().glob("*.o"))[::7]:
        path.unlink(missing_ok=True)
    assert ctypes.CFUNCTYPE(ctypes.c_int32)(jit.load(text, "answer"))() == i
"""
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    crowd = [subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE) for _ in range(4)]
    assert [(process.communicate()[1], process.returncode) for process in crowd] == [(b"", 0)] * 4
    assert {path.suffix for path in (tmp_path / "lychee_cpu").iterdir()} == {".o"}


def test_a_sealed_text_is_opened_or_refused():
    data = jit.sealed(TEXT)
    assert jit.opened(data) == TEXT
    for bad in (b"", data[:-1], data.replace(b"42", b"43"), TEXT.encode()):
        with pytest.raises(jit.DamagedError, match="TRITON_ALWAYS_COMPILE=1"):
            jit.opened(bad)


def test_a_second_process_compiles_nothing(tmp_path):
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", IN_A_PROCESS]
    first, second = (subprocess.run(command, capture_output=True, text=True, env=env) for _ in range(2))
    assert first.stdout == "4950.0 ['compiled', 'compiled', 'make_llir']\n", first.stderr  # the kernel and the runtime
    assert second.stdout == "4950.0 []\n", second.stderr


def test_a_kernel_survives_damage_to_all_files_of_tritons_cache(directory, forget):
    assert sum_of_kernel() == 4950.0
    files = [path for path in directory.parent.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".o", ".variant", ".json", ".llir", ".tir", ".ttir", ".source"}
    for content in (b"", b"{}", b"\xff\xfe\xfd"):
        for path in files:
            path.write_bytes(content)
        forget()
        assert sum_of_kernel() == 4950.0


@pytest.mark.parametrize("suffix", [".llir", ".json"])
def test_one_damaged_file_of_tritons_cache_is_repaired(directory, forget, suffix):
    sum_of_kernel()
    [path] = [path for path in directory.parent.rglob("*" + suffix) if not path.name.startswith("__grp__")]
    for variant in directory.glob("*.variant"):
        variant.unlink()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    forget()
    assert sum_of_kernel() == 4950.0
    assert path.read_bytes() == whole


def test_a_kernel_runs_where_no_cache_can_be_written(tmp_path, monkeypatch, forget):
    Path(tmp_path, "file").write_text("in the way")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert sum_of_kernel() == 4950.0


@pytest.fixture
def asked(monkeypatch):
    """The kernels that Triton was asked for."""
    names = []
    run = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda self, *a, **k: (names.append(self.__name__), run(self, *a, **k))[1])
    return names


def test_a_kernel_compiled_by_another_process_is_found_without_triton(directory, forget, asked):
    sum_of_kernel()
    forget()
    assert sum_of_kernel() == 4950.0
    assert asked == ["add_kernel"]


@pytest.mark.parametrize("suffix", [".o", ".variant"])
def test_a_kernel_of_which_a_file_is_gone_is_left_to_triton(directory, forget, asked, suffix):
    sum_of_kernel()
    for path in directory.glob("*" + suffix):
        path.unlink()
    forget()
    assert sum_of_kernel() == 4950.0
    assert asked == ["add_kernel"] * 2


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"name": "add_kernel"}', b"no json"])
def test_a_variant_that_says_something_else_is_left_to_triton(directory, forget, asked, content):
    sum_of_kernel()
    [path] = directory.glob("*.variant")
    jit.write(path.stem, content, "variant")
    forget()
    assert sum_of_kernel() == 4950.0
    assert asked == ["add_kernel"] * 2


@pytest.mark.parametrize("variable", ["TRITON_ALWAYS_COMPILE", "TRITON_KERNEL_OVERRIDE", "TRITON_KERNEL_DUMP"])
def test_what_triton_is_told_to_do_with_kernels_it_does(directory, forget, asked, monkeypatch, variable):
    sum_of_kernel()
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("TRITON_DUMP_DIR", str(directory / "dump"))
    monkeypatch.setenv("TRITON_OVERRIDE_DIR", str(directory / "override"))
    forget()
    assert sum_of_kernel() == 4950.0
    assert asked == ["add_kernel"] * 2


def test_variants_differ_by_source_constants_dtypes_and_debug(directory, forget):
    """Each launch leaves a file of its own, so none is taken for another."""
    x = torch.arange(128.0)
    made = kernel(add_kernel.jit.fn)
    other = kernel(other_kernel)
    for launch in (
        lambda: made[(4,)](x, torch.zeros(128), 100, BLOCK=32),
        lambda: made[(2,)](x, torch.zeros(128), 100, BLOCK=64),
        lambda: made[(4,)](x.half(), torch.zeros(128), 100, BLOCK=32),
        lambda: made[(4,)](x, torch.zeros(128), 1 << 40, BLOCK=32),
        lambda: made[(4,)](x, torch.zeros(128), 100, BLOCK=32, debug=True),
        lambda: other[(4,)](x, torch.zeros(128), 100, BLOCK=32),
    ):
        before = len(list(directory.glob("*.variant")))
        launch()
        assert len(list(directory.glob("*.variant"))) == before + 1


@pytest.mark.parametrize("setting", ["DISABLE_LLVM_OPT", "debug"])
def test_variants_differ_by_what_triton_is_told_of_compiling(directory, forget, monkeypatch, setting):
    sum_of_kernel()
    if setting == "debug":
        monkeypatch.setattr(knobs.runtime, "debug", True)
    else:
        monkeypatch.setenv(setting, "1")
    forget()
    assert sum_of_kernel() == 4950.0
    assert len(list(directory.glob("*.variant"))) == 2
