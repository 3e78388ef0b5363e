"""From logits to the log-probabilities that are sampled, drafted from and verified: one pipeline for both models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .logit_edits import bias_and_ban, edit_kernel, penalised
from .logit_filters import edge_kernel, filter_kernel, filtered
from .op import op
from .sizes import cdiv, next_power_of_2, runs_on_cpu
from .types import GREEDY_BELOW, NEVER, PROMPT_BIT, Cost, Logits, LogProbs, SamplingRows, SamplingTensors, Scratch


def process_logits_reference(logits: Logits, rows: SamplingRows, sampling: SamplingTensors, vocab: int) -> LogProbs:
    x = logits[:, :vocab].clone()
    seq = rows.seq_idx.long()
    bias_and_ban(x, seq, rows, sampling)
    if sampling.token_counts is not None:
        x = penalised(x, seq, rows, sampling, sampling.token_counts)
    largest = x.amax(-1, keepdim=True)
    x -= largest.masked_fill(largest == NEVER, 0.0)  # nothing left of a row: it stays at -inf, without NaN
    sampled = (sampling.temperature[seq] >= GREEDY_BELOW).nonzero()[:, 0]
    if len(sampled):
        x[sampled] = filtered(x[sampled], sampling, seq[sampled])
    return x


def process_logits_sample(
    dtype: torch.dtype, device: str, *, num_rows: int, num_seqs: int, vocab: int, padding: int, has_counts: bool
) -> dict[str, Any]:
    """Every feature on for some sequences; top_p and min_p keep away from edges that rounding would decide."""
    window, max_ids, ids = 6, 3, (num_seqs, 3)
    integers = lambda low, high, *shape: torch.randint(low, high, shape, dtype=torch.int32)  # noqa: E731
    some = lambda values, off: torch.where(torch.rand(num_seqs) < 0.5, values, torch.full_like(values, off))  # noqa: E731
    recent = integers(-1, min(vocab, 5), num_rows, window)
    rows = SamplingRows(
        integers(0, num_seqs, num_rows), integers(0, 8, num_rows), integers(0, window, num_rows), recent
    )
    counts = integers(0, 3, num_seqs, vocab) * integers(0, 2, num_seqs, vocab)
    counts |= integers(0, 2, num_seqs, vocab) << PROMPT_BIT
    neutral: dict[str, Any] = {
        "temperature": some(torch.rand(num_seqs) + 0.5, 0.0),
        "top_k": torch.zeros(num_seqs, dtype=torch.int32),
        "top_p": torch.ones(num_seqs),
        "min_p": torch.zeros(num_seqs),
        "repetition_penalty": some(torch.rand(num_seqs) + 0.5, 1.0),
        "presence_penalty": some(torch.randn(num_seqs), 0.0),
        "frequency_penalty": some(torch.randn(num_seqs), 0.0),
        "min_position": integers(0, 8, num_seqs),
        "stop_ids": integers(-1, vocab, *ids),
        "bias_ids": integers(-1, vocab, *ids),
        "bias": torch.where(torch.rand(ids) < 0.3, NEVER, torch.randn(ids)),
        "bad_words": integers(-1, min(vocab, 5), num_seqs, max_ids, 3),
        "token_counts": counts if has_counts else None,
    }
    logits = torch.randn(num_rows, vocab + padding) * 3
    unfiltered = process_logits_reference(logits, rows, SamplingTensors(**neutral), vocab)
    filters: dict[str, Any] = {
        "top_k": some(integers(1, vocab + 2, num_seqs), 0),
        "min_p": some(_between(unfiltered - unfiltered.amax(-1, keepdim=True), rows.seq_idx, num_seqs), 0.0),
    }
    chosen = process_logits_reference(logits, rows, SamplingTensors(**neutral | filters), vocab)
    mass = chosen.sort(-1, descending=True).values.exp().cumsum(-1).log()
    filters["top_p"] = some(_between(mass, rows.seq_idx, num_seqs), 1.0)
    sampling: dict[str, Any] = {k: v if v is None else v.to(device) for k, v in (neutral | filters).items()}
    rows = SamplingRows(*(t.to(device) for t in (rows.seq_idx, rows.positions, rows.depths, recent)))
    return {"logits": logits.to(device), "rows": rows, "sampling": SamplingTensors(**sampling), "vocab": vocab}


def _between(log_values: Tensor, seq_idx: Tensor, num_seqs: int) -> Tensor:
    """For each sequence the one of 64 random levels in (0.05, 0.95) that is farthest from all of its rows' values."""
    levels = torch.rand(num_seqs, 64) * 0.9 + 0.05
    distance = (levels[seq_idx.long(), :, None] - log_values.exp()[:, None]).abs().amin(-1)
    nearest = torch.full_like(levels, 1.0).scatter_reduce(0, seq_idx.long()[:, None].expand(-1, 64), distance, "amin")
    return levels.gather(1, nearest.argmax(-1, keepdim=True))[:, 0]


def process_logits_cost(logits: Tensor, rows: SamplingRows, sampling: SamplingTensors, vocab: int) -> Cost:
    """The least it can be: read the logits and the counts, write the log-probabilities."""
    words = 2 if sampling.token_counts is None else 3
    return Cost(flops=8 * logits.shape[0] * vocab, bytes=4 * words * logits.shape[0] * vocab)


def process_logits_scratch(logits: Tensor, rows: SamplingRows, sampling: SamplingTensors, vocab: int) -> Scratch:
    """The largest logit of each block, and what `edge_kernel` finds of each row."""
    num_rows = logits.shape[0]
    blocks = cdiv(vocab, _block(logits))
    return {"maxima": ((num_rows, blocks), torch.float32), "edges": ((num_rows, 4), torch.float32)}


def _block(logits: Tensor) -> int:
    """Tokens that share a maximum: few on the CPU, where skipping one is cheap."""
    return 256 if runs_on_cpu(logits) else 4096


@op(
    reference=process_logits_reference,
    sample=process_logits_sample,
    cost=process_logits_cost,
    typical={"num_rows": 16, "num_seqs": 4, "vocab": 32000, "padding": 0, "has_counts": 1},
    scratch=process_logits_scratch,
)
def process_logits(
    log_probs: Tensor,
    maxima: Tensor,
    edges: Tensor,
    logits: Tensor,
    rows: SamplingRows,
    sampling: SamplingTensors,
    vocab: int,
) -> None:
    """Log-probabilities after bias and bans, min_tokens, bad words, penalties, temperature, min_p, top_k, top_p.

    The order is vLLM's. Columns from vocab on are padding and dropped. Penalties count `token_counts` and the row's own
    path (presence and frequency: emitted tokens only); None means no sequence has any. Values equal to the edge of
    top_k or top_p all stay; top_p keeps the values with less than top_p of the mass strictly above them. A temperature
    below 1e-5 is greedy: no filters, and the result is the logit less its row's largest. A row with everything banned
    is -inf throughout. Logits must be finite or -inf.

    Edits, and the last step, split the vocabulary over programs. Between them one program per row finds the edges, with
    no sort: by bisection over order-preserving integer keys, up to 31 passes for each of top_k and top_p in use. A
    pass reads the blocks of the row whose largest value counts.
    """
    num_rows, model_vocab = logits.shape
    _, max_words, max_len = sampling.bad_words.shape
    max_stop, max_bias = sampling.stop_ids.shape[1], sampling.bias_ids.shape[1]
    counts, BLOCK_V = sampling.token_counts, _block(logits)
    edit_kernel[(cdiv(vocab, 4096), num_rows)](
        log_probs,
        maxima,
        logits,
        rows.seq_idx,
        rows.positions,
        rows.depths,
        rows.recent_tokens,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.min_position,
        sampling.stop_ids,
        sampling.bias_ids,
        sampling.bias,
        sampling.bad_words,
        rows.seq_idx if counts is None else counts,
        vocab,
        model_vocab,
        rows.recent_tokens.shape[1],
        max_stop,
        max_bias,
        max_words,
        max_len,
        HAS_LISTS=bool(max_stop or max_bias or max_words),
        HAS_COUNTS=counts is not None,
        BLOCKS=4096 // BLOCK_V,
        BLOCK_V=BLOCK_V,
        num_warps=8,
    )
    edge_kernel[(num_rows,)](
        edges,
        log_probs,
        maxima,
        rows.seq_idx,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        vocab,
        GREEDY_BELOW,
        BLOCK_V=BLOCK_V,
        BLOCK_B=next_power_of_2(maxima.shape[1]),
        num_warps=8,
    )
    filter_kernel[(cdiv(vocab, 1024), num_rows)](log_probs, edges, vocab, GREEDY_BELOW, BLOCK_V=1024)
