"""What a kernel is compiled for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A CPU by LLVM's name and feature string; `lanes` fp32 values fill one vector register.

    `half` says whether it converts fp16 itself: on x86-64 that is F16C, which came with AVX2.
    """

    cpu: str
    features: str
    lanes: int
    half: bool = True


def host() -> Target:
    """The CPU that this process runs on."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    lanes = 16 if features.get("avx512f") and features.get("avx512vl") else 8 if features.get("avx2") else 4
    half = bool(features.get("f16c", True))
    return Target(llvm.get_host_cpu_name(), features.flatten(), lanes, half)
