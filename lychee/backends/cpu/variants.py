"""Variants of kernels compiled by an earlier process, found without Triton.

Before it knows that a kernel is compiled, Triton hashes its whole installation and reads several files per kernel: most
of the time in which a process loads its kernels. Here one file says for a kernel's source and what it is specialised on
where its object is. Whatever is missing, damaged or older than what it depends on is left to Triton.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from . import jit
from .compiler import CPUBackend
from .target import host

KIND = "variant"  # of file


@dataclass(frozen=True)
class Variant:
    """What a `Launcher` is made of, and the key of the object.

    signature: Triton's names of the parameters' types. args: the types that the compiled function takes.
    """

    name: str
    signature: dict[str, str]
    args: list[str]
    cost: int
    key: str

    @property
    def source(self) -> Any:
        """As `Launcher` takes it."""
        return SimpleNamespace(signature=self.signature)


def found(jit_function: Any, specialised: str) -> tuple[Variant, int] | None:
    """The variant and the address of its code, where an earlier process left both."""
    from triton import knobs

    if any(getattr(knobs.compilation, name, False) for name in ("always_compile", "override", "dump_ir")):
        return None
    digest = _digest(jit_function, specialised)
    data = jit.read(digest, KIND)
    try:
        variant = Variant(**json.loads(data)) if data is not None else None
    except (TypeError, ValueError):
        return None
    address = None if variant is None else jit.load_object(variant.key)
    return None if variant is None or address is None else (variant, address)


def keep(jit_function: Any, specialised: str, kernel: Any) -> None:
    """Note what Triton compiled, for processes to come."""
    signature = dict(kernel.src.signature)
    if any(type(kind) is not str for kind in signature.values()):
        return
    metadata, text = kernel.metadata, jit.opened(kernel.kernel)
    variant = Variant(metadata.name, signature, list(metadata.args), metadata.cost, jit.object_key(text, host()))
    jit.write(_digest(jit_function, specialised), json.dumps(asdict(variant)).encode(), KIND)


def _digest(jit_function: Any, specialised: str) -> str:
    from triton import knobs
    from triton._C.libtriton import get_cache_invalidating_env_vars

    debug = jit_function.debug or knobs.runtime.debug
    variables = repr(sorted(get_cache_invalidating_env_vars().items()))
    parts = jit_function.cache_key, specialised, repr(debug), variables, *_installed()
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@cache
def _installed() -> tuple[str, ...]:
    """The versions of all that compiles."""
    import triton
    from triton._C import libtriton

    library = os.stat(libtriton.__file__)
    stamp = triton.__version__, library.st_mtime_ns, library.st_size
    return repr(stamp), jit.versions(), CPUBackend.hash(None)  # type: ignore[arg-type]
