"""How Triton finds this backend, and how a stretch of code switches it on.

Triton wants exactly one active driver. Ours never claims to be it: `activated` puts it in place for one thread and one
`with` block, so Triton code elsewhere, with a GPU or without one, meets the driver it would have met before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import RLock, get_ident
from time import perf_counter
from types import TracebackType
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

NAME = "lychee_cpu"  # the backend's name, and the device's: no device of torch is called so


class _Utils:
    """What Triton asks of a device's loader."""

    def get_device_properties(self, device: str) -> dict[str, int]:
        return {"max_shared_mem": 1 << 30}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: str) -> tuple[None, int, int, int, int]:
        """(module, function, registers, spilled, threads).

        No module: code stays loaded for good, and Triton would unload one through whatever driver is active by then.
        For want of one it asks again at every launch, so this and `launcher_cls` are cheap when repeated.
        """
        from .launch import loaded

        return None, loaded(kernel), 0, 0, 1 << 30

    def unload_module(self, module: Any) -> None:
        pass


def _benchmark(
    call: Callable[[], Any], quantiles: Sequence[float] = (0.5,), warmup: float = 5, rep: float = 50, **_: Any
) -> list[float]:
    """Milliseconds of a call at each quantile, for Triton's autotuner; warmup and rep are milliseconds to spend."""
    times: list[float] = []
    start = now = perf_counter()
    while now - start < (warmup + rep) / 1e3 or not times:
        before = perf_counter()
        call()
        now = perf_counter()
        if now - start > warmup / 1e3:
            times.append((now - before) * 1e3)
    times.sort()
    return [times[min(len(times) - 1, int(q * len(times)))] for q in quantiles]


class CPUDriver(DriverBase):  # type: ignore[misc]
    """The CPU as a Triton device."""

    def __init__(self) -> None:
        from .launch import launcher

        self.utils = _Utils()
        self.launcher_cls = launcher

    @classmethod
    def is_active(cls) -> bool:
        return False

    def get_current_device(self) -> str:
        return NAME

    def set_current_device(self, device: str) -> None:
        pass

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> Any:
        from .target import host

        return GPUTarget(NAME, host().cpu, 1)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        import torch

        return torch.cpu

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Any:
        return _benchmark

    def get_empty_cache_for_benchmark(self) -> Any:
        import torch

        return torch.empty(1 << 26, dtype=torch.int8)

    def clear_cache(self, cache: Any) -> None:
        cache.zero_()


class _Scoped:
    """The active driver while one thread is inside `activated`: the CPU's for that thread, `before` for the others."""

    def __init__(self, driver: CPUDriver, config: Any) -> None:
        self._cpu, self._config, self._before, self._thread = driver, config, config._active, get_ident()

    def __getattr__(self, name: str) -> Any:
        if get_ident() == self._thread:
            return getattr(self._cpu, name)
        return getattr(self._config.default if self._before is None else self._before, name)


class activated:  # noqa: N801 - used as a function
    """Within `with activated():` this thread's Triton launches compile for the CPU and run on CPU tensors.

    Re-entrant; one thread at a time is inside, others wait. Triton's active driver is the same after as before.
    """

    __slots__ = ("_before",)
    _lock = RLock()
    _driver: Any = None
    _config: Any = None

    @classmethod
    def _start(cls) -> None:
        from triton.backends import Backend, backends
        from triton.runtime.driver import driver

        from .compiler import CPUBackend

        # Triton sees no entry points with TRITON_BACKENDS_IN_TREE=1, nor those of a checkout that is not installed.
        backends.setdefault(NAME, Backend(CPUBackend, CPUDriver))
        cls._driver, cls._config = CPUDriver(), driver

    def __enter__(self) -> None:
        cls = activated
        cls._lock.acquire()
        try:
            if cls._driver is None:
                cls._start()
            config = cls._config
            before = self._before = config._active
            if type(before) is not _Scoped:
                config._active = _Scoped(cls._driver, config)
        except BaseException:
            cls._lock.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        activated._config._active = self._before
        activated._lock.release()
