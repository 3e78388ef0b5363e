"""What a kernel is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Target:
    """A CPU by LLVM's name and feature string; `lanes` fp32 values fill one vector register."""

    cpu: str
    features: str
    lanes: int


@cache
def host() -> Target:
    """The CPU that this process runs on."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    lanes = 16 if features.get("avx512f") and features.get("avx512vl") else 8 if features.get("avx2") else 4
    return Target(llvm.get_host_cpu_name(), features.flatten(), lanes)
