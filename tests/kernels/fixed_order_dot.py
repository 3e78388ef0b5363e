"""A dot for Triton's interpreter that sums in one order; BLAS lets an element's order depend on where it stands."""

from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter

from tests.conftest import DEVICE


def _create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    left, right = (np.ascontiguousarray(x.data, dtype=d.data.dtype) for x in (a, b))
    products = left[:, :, None] * right[None]
    return interpreter.TensorHandle(products.sum(axis=1) + d.data, d.dtype.scalar)


@pytest.fixture
def fixed_order_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Needed by tests of bitwise equality; a GPU's dot has this property itself."""
    if DEVICE == "cpu":
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", _create_dot)
