"""Ops: each a Triton launch, a torch reference, a contract, sample inputs and a cost, in one file per family."""

from .op import OPS, ContractError, Op
from .rms_norm import rms_norm
from .types import Cost

__all__ = ["OPS", "ContractError", "Cost", "Op", "rms_norm"]
