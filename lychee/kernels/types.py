"""The tensor vocabulary: every named tensor's axes, dtypes and unit, said once.

An axis may be written `num_seqs+1`. A spec that admits several dtypes names one dtype shared by all tensors of that
set in a call. Every tensor is contiguous. Struct arguments (frozen dataclasses) are checked field by field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

import torch
from torch import Tensor

FLOAT = (torch.float32, torch.float16, torch.bfloat16)
F32 = (torch.float32,)
F32_OR_F64 = (torch.float32, torch.float64)
I32 = (torch.int32,)
I64 = (torch.int64,)
BOOL = (torch.bool,)
I8 = (torch.int8,)
U8 = (torch.uint8,)
SCALES = (torch.float16, torch.float32)
KV = (*FLOAT, torch.int8)  # cache_width is head_dim, or for int8 what kv_int8.py says

NEVER = float("-inf")  # log-probability of a token that cannot be drawn, bias of one that is banned
GREEDY_BELOW = 1e-5  # vLLM's epsilon: a lower temperature is greedy
PROMPT_BIT = 30  # of SamplingTensors.token_counts: the token is in the prompt; the bits below count its emissions


# Shape and dtype of a launch's buffers by name; None for one that this call does without.
Scratch = Mapping[str, tuple[tuple[int, ...], torch.dtype] | None]


@dataclass(frozen=True)
class Spec:
    axes: str
    dtypes: tuple[torch.dtype, ...]
    unit: str = ""
    mutated: bool = False

    def mutates(self) -> Spec:
        """The same tensor, written in place by the op."""
        return replace(self, mutated=True)

    @cached_property
    def parsed(self) -> tuple[tuple[str, int], ...]:
        """("num_seqs", 1) for `num_seqs+1`, axis by axis."""
        parts = (axis.partition("+") for axis in self.axes.split())
        return tuple((name, int(more or 0)) for name, _, more in parts)


@dataclass(frozen=True)
class Cost:
    """Arithmetic and memory traffic of one call."""

    flops: int
    bytes: int


# Activations and weights
Hidden = Annotated[Tensor, Spec("num_tokens hidden", FLOAT)]
HiddenScale = Annotated[Tensor, Spec("hidden", FLOAT)]
HeadScale = Annotated[Tensor, Spec("head_dim", FLOAT)]
EmbedTable = Annotated[Tensor, Spec("model_vocab hidden", FLOAT)]
Features = Annotated[Tensor, Spec("num_tokens in_features", FLOAT)]
FeaturesF32 = Annotated[Tensor, Spec("num_tokens in_features", F32)]
Weight = Annotated[Tensor, Spec("out_features in_features", FLOAT)]
Bias = Annotated[Tensor, Spec("out_features", FLOAT)]
Projected = Annotated[Tensor, Spec("num_tokens out_features", FLOAT)]
ProjectedF32 = Annotated[Tensor, Spec("num_tokens out_features", F32)]
Intermediate = Annotated[Tensor, Spec("num_tokens intermediate", FLOAT)]
Queries = Annotated[Tensor, Spec("num_tokens num_heads head_dim", FLOAT)]
Keys = Annotated[Tensor, Spec("num_tokens num_kv_heads head_dim", FLOAT)]
Values = Keys


@dataclass(frozen=True)
class Int8Weight:
    """w[n, k] = scales[n, k // group] * values[n, k], where group = in_features / num_groups: 32, or all of them."""

    values: Annotated[Tensor, Spec("out_features in_features", I8)]
    scales: Annotated[Tensor, Spec("out_features num_groups", SCALES)]


@dataclass(frozen=True)
class Int4Weight:
    """w[n, k] = scales[n, k // group] * q + minimums[n, k // group], q from 0 to 15; group is 32, 64 or 128.

    Byte j of every 16 holds the q of elements j (low half) and j + 16 (high half) of its 32, as in GGUF. Without
    minimums they are -8 * scales.
    """

    packed: Annotated[Tensor, Spec("out_features half_features", U8)]
    scales: Annotated[Tensor, Spec("out_features num_groups", SCALES)]
    minimums: Annotated[Tensor, Spec("out_features num_groups", SCALES)] | None


# Rows of a ragged batch
TokenIds = Annotated[Tensor, Spec("num_tokens", I32, "token id")]
Positions = Annotated[Tensor, Spec("num_tokens", I32, "absolute position in the sequence")]
SlotMapping = Annotated[Tensor, Spec("num_tokens", I32, "KV slot the row writes; -1 writes nothing")]
SeqIdx = Annotated[Tensor, Spec("num_tokens", I32, "sequence the row belongs to")]
Ancestors = Annotated[
    Tensor, Spec("num_tokens max_path", I32, "node at each depth of the row's path, itself last; -1 past it")
]
RopeTable = Annotated[Tensor, Spec("num_positions head_dim", F32, "cos of head_dim/2 angles, then sin")]

# The paged KV cache
KVCache = Annotated[Tensor, Spec("num_slots num_kv_heads cache_width", KV, "one layer's keys, or its values")]
KVCacheWritten = Annotated[Tensor, KVCache.__metadata__[0].mutates()]
KVStorageWritten = Annotated[
    Tensor, Spec("num_layers two num_slots num_kv_heads cache_width", KV, "keys, values of all layers", mutated=True)
]
CuSeqlensQ = Annotated[Tensor, Spec("num_seqs+1", I32, "prefix sum of rows per sequence")]
ContextLens = Annotated[Tensor, Spec("num_seqs", I32, "committed tokens whose KV is cached, before these rows")]
BlockTables = Annotated[
    Tensor, Spec("num_seqs max_blocks", I32, "block id; slot = id * block_size + position % block_size")
]
Paths = Annotated[Tensor, Spec("num_seqs max_path", I32, "accepted node by depth, root first; -1 past the end")]
PathLens = Annotated[Tensor, Spec("num_seqs", I32, "nodes on the accepted path, root included; >= 1")]
NextTokens = Annotated[Tensor, Spec("num_seqs", I32, "bonus or recovered token id")]


@dataclass(frozen=True)
class Paging:
    """Where the rows of a ragged batch find their keys and values.

    Rows `cu_seqlens_q[s] : cu_seqlens_q[s + 1]` belong to sequence s. In decode, row i of a sequence is node i of its
    tree, stored at slot `context_len + i`; in prefill it is the token at position `context_len + i`.
    """

    cu_seqlens_q: CuSeqlensQ
    seq_idx: SeqIdx
    context_lens: ContextLens
    block_tables: BlockTables
    block_size: int
    max_rows: int  # most rows of any sequence
    max_context: int  # largest context_len

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.max_rows < 0 or self.max_context < 0:
            raise ValueError(
                f"block_size is {self.block_size}, must be at least 1; max_rows is {self.max_rows} and max_context "
                f"{self.max_context}, must be at least 0"
            )


# Sampling
Logits = Annotated[Tensor, Spec("num_rows model_vocab", F32)]
LogProbs = Annotated[
    Tensor, Spec("num_rows vocab", F32, "processed log-probability; at temperature 0 the logit less its row's maximum")
]
Draws = Annotated[Tensor, Spec("num_rows num_samples", I32, "token id in draw order; -1 where the support ran out")]
RowSeqIdx = Annotated[Tensor, Spec("num_rows", I32)]
RowInts = Annotated[Tensor, Spec("num_rows", I32)]
RowSeeds = Annotated[Tensor, Spec("num_rows", I64)]
RowFlags = Annotated[Tensor, Spec("num_rows", BOOL)]
PhiloxCounters = Annotated[Tensor, Spec("num_rows four", I32, "128-bit counter, low word first")]
PhiloxBits = Annotated[Tensor, Spec("num_rows four", I32, "128 random bits, low word first")]
SeqInts = Annotated[Tensor, Spec("num_seqs", I32)]
SeqSeeds = Annotated[Tensor, Spec("num_seqs", I64)]
SeqFloats = Annotated[Tensor, Spec("num_seqs", F32)]


@dataclass(frozen=True)
class SamplingRows:
    """What the sampling pipeline must know of each row.

    `recent_tokens[r]` is right-aligned: its last column is the row's own token, preceded by its path, then the prefix;
    -1 before the start. The last `depths[r]` of them are on the row's path past the root, so not yet in `token_counts`.
    """

    seq_idx: RowSeqIdx
    positions: RowInts
    depths: RowInts
    recent_tokens: Annotated[Tensor, Spec("num_rows window", I32)]


@dataclass(frozen=True)
class SamplingTensors:
    """Sampling parameters, one entry per sequence; 0 or 1 switches a filter or penalty off as in vLLM."""

    temperature: SeqFloats  # 0 is greedy
    top_k: SeqInts  # 0 is off
    top_p: SeqFloats  # 1 is off
    min_p: SeqFloats  # 0 is off
    repetition_penalty: SeqFloats  # 1 is off
    presence_penalty: SeqFloats
    frequency_penalty: SeqFloats
    min_position: SeqInts  # stop_ids are banned for tokens below this position
    stop_ids: Annotated[Tensor, Spec("num_seqs max_stop", I32, "-1 pads")]
    bias_ids: Annotated[Tensor, Spec("num_seqs max_bias", I32, "-1 pads")]
    bias: Annotated[Tensor, Spec("num_seqs max_bias", F32, "added to the logit; -inf bans")]
    bad_words: Annotated[Tensor, Spec("num_seqs max_words max_word_len", I32, "right-aligned; -1 pads")]
    token_counts: Annotated[Tensor, Spec("num_seqs vocab", I32, "times emitted; bit 30: in the prompt")] | None


@dataclass(frozen=True)
class NoiseKeys:
    """Philox keys and counters of each row's noise; see philox.py for the packing."""

    seeds: RowSeeds
    positions: RowInts  # target stream: position of the token drawn; draft stream: the round's root position
    nodes: RowInts  # draft stream: the node whose children are drawn; target stream: 0
    sample_idx: RowInts
    greedy: RowFlags  # no noise: the largest log-probability wins


@dataclass(frozen=True)
class SeqKeys:
    """Philox keys of each sequence's acceptance noise in one round."""

    seeds: SeqSeeds
    root_positions: SeqInts
    sample_idx: SeqInts


@dataclass(frozen=True)
class Tree:
    """Proposed trees of a ragged batch. parents[i] < i is local to its request; the root's is -1.

    Siblings stand in draw order. A dead node (never drawn) has token -1.
    """

    cu_nodes: CuSeqlensQ
    tokens: Annotated[Tensor, Spec("num_nodes", I32, "token id")]
    parents: Annotated[Tensor, Spec("num_nodes", I32, "local node index")]


NodeTokens = Annotated[Tensor, Spec("num_nodes", I32, "the target's own draw after each node")]
NodeLogProbs = Annotated[Tensor, Spec("num_nodes vocab", F32_OR_F64, "processed log-probability, normalised")]
