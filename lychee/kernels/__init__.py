"""Ops: each a Triton launch, a torch reference, a contract, sample inputs and a cost, in one file per family."""

from .accept_coupled import accept_coupled
from .accept_rejection import accept_rejection
from .attention import attention
from .attention_prefill import attention_prefill
from .contract import ContractError
from .embed import embed
from .kv_store import commit_kv
from .linear import linear, linear_prefill, lm_head
from .logits import process_logits
from .op import OPS, Op
from .philox import philox
from .rms_norm import add_rms_norm, rms_norm
from .rope import rope_store
from .sample import draw
from .swiglu import swiglu
from .types import Cost

__all__ = [
    "OPS",
    "ContractError",
    "Cost",
    "Op",
    "accept_coupled",
    "accept_rejection",
    "add_rms_norm",
    "attention",
    "attention_prefill",
    "commit_kv",
    "draw",
    "embed",
    "linear",
    "linear_prefill",
    "lm_head",
    "philox",
    "process_logits",
    "rms_norm",
    "rope_store",
    "swiglu",
]
