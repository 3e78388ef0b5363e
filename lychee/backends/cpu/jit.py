"""LLVM text to running code: optimise, emit an object, keep it on disk, load it.

An object is found by all that it depends on: the text, the CPU, the versions of LLVM and of the pipeline below. Files
are replaced atomically and verified when read; a file that is damaged is compiled anew, a directory that cannot be
written is done without.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any

from .target import Target, host

PIPELINE = "3"  # to be changed with what `compiled` does
_MAGIC = b"lychee object 1\n"
_SEAL = b"; sha256 "


class DamagedError(RuntimeError):
    """What Triton's cache gave back is not what was put there."""


def sealed(text: str) -> bytes:
    """The text under a comment with its checksum: Triton's cache does not verify what it reads."""
    body = text.encode()
    return _SEAL + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def opened(data: bytes) -> str:
    """The text that was `sealed`; raises DamagedError."""
    head, _, body = data.partition(b"\n")
    if head != _SEAL + hashlib.sha256(body).hexdigest().encode():
        raise DamagedError(
            "a kernel in Triton's cache is damaged: delete the cache directory, or set TRITON_ALWAYS_COMPILE=1"
        )
    return body.decode()


@cache
def _llvm() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


def _machine(target: Target) -> Any:
    triple = _llvm().Target.from_default_triple()
    return triple.create_target_machine(cpu=target.cpu, features=target.features, opt=1)


def versions() -> str:
    """Of all that makes an object of a text."""
    import llvmlite

    return repr((llvmlite.__version__, _llvm().llvm_version_info, PIPELINE))


def object_key(text: str, target: Target) -> str:
    return hashlib.sha256("\0".join((text, repr(target), versions())).encode()).hexdigest()


def compiled(text: str, target: Target) -> bytes:
    """Object code of a module for the target, without any cache. Raises RuntimeError on text that LLVM refuses."""
    llvm, machine = _llvm(), _machine(target)
    module = llvm.parse_assembly(text)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    module.verify()
    # The text is vectorised already and one function once inlined: scalar passes and code motion are all that pays.
    # Unrolling on top (what level 2 does) doubles the time of code generation, and no kernel runs faster for it.
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=1))
    inliner = llvm.create_new_module_pass_manager()
    inliner.add_always_inliner_pass()
    inliner.run(module, builder)
    for function in module.functions:
        if not function.is_declaration:
            builder.getFunctionPassManager().run(function, builder)
    return bytes(machine.emit_object(module))


def _directory() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir) / "lychee_cpu"


def read(key: str, kind: str = "o") -> bytes | None:
    """What was written under the key, None where there is nothing or it is not what was written."""
    try:
        data = (_directory() / f"{key}.{kind}").read_bytes()
    except OSError:
        return None
    start = len(_MAGIC) + 32
    code = data[start:]
    return code if data[:start] == _MAGIC + hashlib.sha256(key.encode() + code).digest() else None


def write(key: str, code: bytes, kind: str = "o") -> None:
    """Keep it for this process and others; where that cannot be, nothing is kept."""
    path = _directory() / f"{key}.{kind}"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(key.encode() + code).digest() + code)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise


_lock = RLock()
_built: dict[str, bytes] = {}  # of this process, until loaded
_loaded: dict[str, Any] = {}  # engines own the code, which stays for the life of the process


def build(text: str, target: Target) -> str:
    """Make sure that the module's object code exists; gives its key."""
    key = object_key(text, target)
    with _lock:
        if key not in _loaded and key not in _built:
            code = read(key)
            if code is None:
                code = compiled(text, target)
                write(key, code)
            _built[key] = code
    return key


def load(text: str, symbol: str = "run") -> int:
    """Address of a function of the module, compiled for this CPU."""
    with _lock:
        return _address(build(text, host()), symbol)


def load_object(key: str, symbol: str = "run") -> int | None:
    """As `load`, of an object that was built before; None where it is not at hand."""
    with _lock:
        if key not in _loaded and key not in _built:
            code = read(key)
            if code is None:
                return None
            _built[key] = code
        return _address(key, symbol)


def _address(key: str, symbol: str) -> int:
    if key not in _loaded:
        llvm, machine = _llvm(), _machine(host())
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        engine.add_object_file(llvm.ObjectFileRef.from_data(_built[key]))
        engine.finalize_object()
        _loaded[key] = engine
        del _built[key]
    return int(_loaded[key].get_function_address(symbol))
