"""From a Triton kernel to machine code, stage by stage; Triton's compiler runs the stages and caches what they make."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from triton.backends.compiler import BaseBackend, Language

from .driver import NAME


@dataclass(frozen=True)
class CPUOptions:
    """What a launch may say besides its arguments. Triton looks every keyword up here, and its front end reads some."""

    debug: bool = False  # device_assert and the overflow checks are compiled
    sanitize_overflow: bool = False

    supported_fp8_dtypes: tuple[str, ...] = ()
    deprecated_fp8_dot_operand_dtypes: tuple[str, ...] = ()
    default_dot_input_precision: str = "ieee"
    allowed_dot_input_precisions: tuple[str, ...] = (
        "ieee",
        "tf32",
        "tf32x3",
        "bf16x3",
        "bf16x6",
    )  # all are computed as ieee
    backend_name: str = NAME
    arch: str = ""
    extern_libs: tuple[Any, ...] = ()

    # For GPUs: accepted and of no meaning here.
    num_warps: int = 1
    num_stages: int = 1
    num_ctas: int = 1
    warp_size: int = 1
    maxnreg: int | None = None
    ptx_version: int | None = None
    ptx_options: str | None = None
    ir_override: str | None = None
    enable_fp_fusion: bool = True
    enable_reflect_ftz: bool = True
    allow_flush_denorm: bool = False
    launch_cooperative_grid: bool = False
    launch_pdl: bool = False
    waves_per_eu: int = 0
    matrix_instr_nonkdim: int = 0
    kpack: int = 1
    schedule_hint: str = ""
    llvm_fn_attrs: str = ""
    max_num_imprecise_acc_default: int = 0
    instrumentation_mode: str = ""
    fpsan_homomorphic_casts: bool = False

    def hash(self) -> str:
        return f"{self.debug}-{self.sanitize_overflow}"


class CPUBackend(BaseBackend):  # type: ignore[misc]
    """Stages: ttir, Triton's IR after its own passes; tir, the same as our objects; llir, LLVM's, and machine code."""

    binary_ext = "llir"

    @staticmethod
    def supports_target(target: Any) -> bool:
        return bool(target.backend == NAME)

    def hash(self) -> str:
        """The sources of this backend and the CPU: kernels of another CPU or of other sources are compiled anew."""
        from .target import host

        return f"{NAME}-{_sources()}-{host()}"

    def parse_options(self, options: Mapping[str, Any]) -> CPUOptions:
        debug = bool(options.get("debug"))
        return CPUOptions(debug, debug and bool(options.get("sanitize_overflow", True)))

    def pack_metadata(self, metadata: Any) -> tuple[()]:
        return ()

    def get_codegen_implementation(self, options: CPUOptions) -> dict[str, Callable[..., Any]]:
        return {"min_dot_size": lambda lhs, rhs: (1, 1, 1)}

    def get_module_map(self) -> dict[str, ModuleType]:
        from . import libdevice

        return {"triton.language.extra.libdevice": libdevice}

    def load_dialects(self, context: Any) -> None:
        pass

    @staticmethod
    def parse_attr(desc: str) -> list[Any]:
        """None: divisibility by 16 would only multiply the variants of a kernel."""
        return []

    def add_stages(self, stages: dict[str, Callable[[Any, Any], Any]], options: CPUOptions, language: Any) -> None:
        if language != Language.TRITON:
            raise RuntimeError(f"{language} describes a GPU's layouts: the CPU runs Triton kernels only")
        stages["ttir"] = lambda module, metadata: make_ttir(module)
        stages["tir"] = lambda module, metadata: make_tir(module, metadata)
        stages["llir"] = lambda func, metadata: make_llir(func, metadata)


@cache
def _sources() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def make_ttir(module: Any) -> Any:
    """Inlined, simplified, and free of block pointers and descriptors."""
    from triton._C.libtriton import ir, passes

    manager = ir.pass_manager(module.context)
    passes.common.add_inliner(manager)
    if hasattr(passes.ttir, "add_rewrite_tensor_pointer"):
        passes.ttir.add_rewrite_tensor_pointer(manager)
    passes.ttir.add_rewrite_tensor_descriptor_to_pointer(manager)
    passes.common.add_canonicalizer(manager)
    passes.ttir.add_combine(manager)
    passes.ttir.add_reorder_broadcast(manager)
    passes.common.add_cse(manager)
    passes.ttir.add_triton_licm(manager)
    passes.common.add_symbol_dce(manager)
    manager.run(module, "make_ttir")
    return module


def make_tir(module: Any, metadata: dict[str, Any]) -> Any:
    """The kernel as a `ttir.Func`; the module is of no use afterwards."""
    from . import ttir

    func = ttir.read(ttir.generic_text(module))
    metadata["name"] = func.name
    return func


def make_llir(func: Any, metadata: dict[str, Any]) -> bytes:
    """LLVM's text, sealed; its object code goes to the object cache."""
    from . import jit
    from .lower import lower
    from .target import host

    lowered = lower(func, host())
    metadata |= {"args": lowered.args, "cost": lowered.cost, "shared": 0}
    jit.build(lowered.text, host())
    return jit.sealed(lowered.text)
