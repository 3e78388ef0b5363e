"""An Op is one operation with its faces: Triton launch, torch reference, sample inputs, cost.

The reference's annotated signature is the contract (`contract.py`). A launch is destination-passing: outputs, then
scratch, then the inputs in the reference's order. `Op` allocates outputs from the contract's axes and refuses inputs
that break it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast

import torch

from .call_code import call_code
from .contract import Binding, Contract
from .types import Cost, Scratch

P = ParamSpec("P")
R = TypeVar("R")

CPU = torch.device("cpu")
OPS: dict[str, Op[Any, Any]] = {}


class Op(Generic[P, R]):
    """A registered operation: call it, or use one of its faces (`launch`, `reference`, `sample`, `cost`)."""

    def __init__(
        self,
        launch: Callable[..., None],
        reference: Callable[P, R],
        sample: Callable[..., dict[str, Any]],
        cost: Callable[..., Cost],
        typical: Mapping[str, int],
        scratch: Callable[..., Scratch] | None,
    ) -> None:
        self.name = launch.__name__
        self.launch, self.reference, self.sample, self.cost = launch, reference, sample, cost
        self.typical, self.scratch = dict(typical), scratch
        self.contract = Contract(self.name, reference)
        keyword_only = inspect.Parameter.KEYWORD_ONLY
        self.axes = tuple(n for n, p in inspect.signature(sample).parameters.items() if p.kind is keyword_only)
        self.__doc__ = launch.__doc__
        # A class of its own, whose instances Python calls with nothing between: a method here would cost half a
        # microsecond.
        call = call_code(self.contract, launch, scratch, self._run_checked)
        self.__class__ = type(self.name, (Op,), {"__call__": staticmethod(call)})

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def run(self, arguments: Mapping[str, Any], binding: Binding) -> R:
        """Allocate outputs and scratch, launch on checked arguments, and return the outputs."""
        outputs = [
            torch.empty(binding.shape(s), dtype=binding.dtype(s), device=binding.device) for s in self.contract.outputs
        ]
        extra = self.scratch(**arguments) if self.scratch else {}
        scratch = [b and torch.empty(b[0], dtype=b[1], device=binding.device) for b in extra.values()]
        self.launch(*outputs, *scratch, **arguments)
        return cast(R, tuple(outputs) if len(outputs) > 1 else outputs[0] if outputs else None)

    def _run_checked(self, *args: Any) -> R:
        """What the generated code does not let through."""
        arguments = dict(zip(self.contract.parameters, args, strict=True))
        binding = self.contract.check(arguments)
        if binding.stand_in is not None:
            return cast(R, binding.stand_in.record(self, arguments, binding))
        return self.run(arguments, binding)


def op(
    *,
    reference: Callable[P, R],
    sample: Callable[..., dict[str, Any]],
    cost: Callable[..., Cost],
    typical: Mapping[str, int],
    scratch: Callable[..., Scratch] | None = None,
) -> Callable[[Callable[..., None]], Op[P, R]]:
    """Register a launch as an op. `typical` gives a production size for every axis that `sample` takes.

    `scratch(**inputs)` names buffers (shape, dtype) that the launch needs besides its outputs; they follow the outputs,
    with None for one that is not needed this time.
    """

    def register(launch: Callable[..., None]) -> Op[P, R]:
        made = Op(launch, reference, sample, cost, typical, scratch)
        if made.name in OPS:
            raise ValueError(f"op {made.name} is registered twice")
        if set(made.axes) != set(typical):
            raise ValueError(f"op {made.name}: typical has {sorted(typical)}, sample takes {sorted(made.axes)}")
        OPS[made.name] = made
        return made

    return register
