"""What may stand in for tensors: a value whose op calls are recorded, and a tensor whose launches are kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .contract import Binding
    from .op import Op

_AS_SUBCLASS = Tensor.as_subclass


class Symbol:
    """A size that is not known yet; it may be given where an op takes an axis as a number."""


class StandIn(ABC):
    """A tensor's shape, dtype and device without its elements: an op called with one records the call with it.

    Sizes may be symbols; the contract compares them, and adds and subtracts whole numbers. Always contiguous.
    """

    shape: Any
    dtype: torch.dtype
    device: torch.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @abstractmethod
    def record(self, op: Op[Any, Any], arguments: dict[str, Any], binding: Binding) -> Any:
        """Take a checked call; returns what stands for its outputs."""


class BoundTensor(Tensor):
    """A CPU tensor of which launches are bound and kept in `launches`, of its class, instead of run.

    The short way of a launch reads addresses. That there is none here leads to the long way, which looks for this
    class. Views are of the class too.
    """

    launches: ClassVar[list[Any]]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
        return made.as_subclass(cls) if isinstance(made, Tensor) and func is not _AS_SUBCLASS else made

    def data_ptr(self) -> int:
        raise AttributeError("a launch on this tensor is to be bound")


def bound_class(launches: list[Any]) -> type[BoundTensor]:
    """A class of tensors whose launches go to `launches`: make one with `tensor.as_subclass`."""
    return type("Bound", (BoundTensor,), {"launches": launches})
