"""Ops: each a Triton launch, a torch reference, a contract, sample inputs and a cost, in one file per family."""

from .accept_coupled import accept_coupled
from .accept_rejection import accept_rejection
from .accept_traversal import accept_traversal
from .attention import attention
from .attention_prefill import attention_prefill
from .confidence import confidence
from .contract import ContractError
from .embed import embed
from .embed_quantized import embed_int4, embed_int8
from .gated_linear import gated_linear, gated_linear_int8
from .kv_store import commit_kv
from .linear import linear, lm_head
from .linear_int4 import linear_int4, linear_int4_prefill, lm_head_int4
from .linear_int8 import linear_int8, linear_int8_prefill, lm_head_int8
from .linear_prefill import linear_prefill
from .logits import process_logits
from .op import OPS, Op
from .philox import philox
from .rms_norm import add_rms_norm, rms_norm
from .rope import rope_store
from .sample import draw
from .spread import spread_logits
from .swiglu import swiglu
from .take_tokens import take_tokens
from .types import Cost

__all__ = [
    "OPS",
    "ContractError",
    "Cost",
    "Op",
    "accept_coupled",
    "accept_rejection",
    "accept_traversal",
    "add_rms_norm",
    "attention",
    "attention_prefill",
    "commit_kv",
    "confidence",
    "draw",
    "embed",
    "embed_int4",
    "embed_int8",
    "gated_linear",
    "gated_linear_int8",
    "linear",
    "linear_int4",
    "linear_int4_prefill",
    "linear_int8",
    "linear_int8_prefill",
    "linear_prefill",
    "lm_head",
    "lm_head_int4",
    "lm_head_int8",
    "philox",
    "process_logits",
    "rms_norm",
    "rope_store",
    "spread_logits",
    "swiglu",
    "take_tokens",
]
