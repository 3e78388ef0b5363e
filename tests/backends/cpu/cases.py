"""What a kernel test case is: it launches kernels on CPU tensors and yields what it got beside what it should be."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
EPSILON = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-11}


@dataclass(frozen=True)
class Check:
    """`tolerance` is absolute and relative; 0 compares bits. None takes that of the wanted dtype (0 for integers)."""

    name: str
    got: Tensor
    want: Tensor
    tolerance: float | None = None

    def verify(self) -> None:
        tolerance = EPSILON.get(self.want.dtype, 0.0) if self.tolerance is None else self.tolerance
        torch.testing.assert_close(
            self.got, self.want, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{self.name}: {m}"
        )


@dataclass(frozen=True)
class Case:
    """A kernel and its expected results; `checks` launches when iterated over, so the caller chooses the mode."""

    checks: Callable[[torch.dtype], Iterator[Check]]
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)

    @property
    def name(self) -> str:
        return self.checks.__name__

    def verify(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        count = 0
        for check in self.checks(dtype):
            check.verify()
            count += 1
        assert count, f"{self.name} checked nothing"


def parameters(cases: tuple[Case, ...]) -> list[tuple[Case, torch.dtype]]:
    return [(case, dtype) for case in cases for dtype in case.dtypes]


def label(value: Case | torch.dtype) -> str:
    return value.name if isinstance(value, Case) else str(value).removeprefix("torch.")
