"""The two faces of an op under one calling convention, for tests that must hold of both."""

from typing import Any

import pytest

from lychee.kernels import Op


def launch(op: Op[Any, Any], **inputs: Any) -> Any:
    """The Triton launch, on fresh outputs and scratch."""
    return op.run(inputs, op.contract.check(inputs))


def reference(op: Op[Any, Any], **inputs: Any) -> Any:
    return op.reference(**inputs)


both_faces = pytest.mark.parametrize("face", [reference, launch], ids=["reference", "launch"])
