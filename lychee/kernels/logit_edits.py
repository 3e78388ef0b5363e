"""First part of process_logits: logit bias, bans and penalties."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from .kernel import kernel
from .types import NEVER, PROMPT_BIT, SamplingRows, SamplingTensors


def bias_and_ban(x: Tensor, seq: Tensor, rows: SamplingRows, sampling: SamplingTensors) -> None:
    """Add biases; ban stop ids below min_position and the last tokens of bad words whose beginnings just passed."""
    if sampling.bias_ids.numel():
        _add(x, sampling.bias_ids[seq], sampling.bias[seq])
    early = rows.positions + 1 < sampling.min_position[seq]
    if sampling.stop_ids.numel() and early.any():
        _add(x, sampling.stop_ids[seq], torch.where(early, NEVER, 0.0)[:, None])
    if sampling.bad_words.numel():
        *_, length = sampling.bad_words.shape
        words = sampling.bad_words[seq]
        recent = torch.nn.functional.pad(rows.recent_tokens, (length, 0), value=-1)
        begun = recent[:, None, recent.shape[1] - (length - 1) :]
        beginning = words[..., :-1]
        matches = ((beginning == -1) | (beginning == begun)).all(-1)
        _add(x, words[..., -1], torch.where(matches, NEVER, 0.0))


def _add(x: Tensor, ids: Tensor, values: Tensor) -> None:
    """x[row, ids[row]] += values[row], duplicates adding up; an id outside the vocabulary pads."""
    inside = (ids >= 0) & (ids < x.shape[1])
    x.scatter_add_(1, ids.clamp(0, x.shape[1] - 1).long(), torch.where(inside, values, 0.0))


def penalised(x: Tensor, seq: Tensor, rows: SamplingRows, sampling: SamplingTensors, token_counts: Tensor) -> Tensor:
    """Counts are the sequence's, plus the row's own path past the root."""
    repetition = sampling.repetition_penalty[seq, None]
    presence, frequency = sampling.presence_penalty[seq, None], sampling.frequency_penalty[seq, None]
    if bool(((repetition == 1) & (presence == 0) & (frequency == 0)).all()):
        return x
    counts = token_counts[seq]
    emitted = counts & (1 << PROMPT_BIT) - 1
    window = rows.recent_tokens.shape[1]
    on_path = torch.arange(window, device=x.device) >= window - rows.depths[:, None]
    path = torch.where(on_path, rows.recent_tokens, -1)
    emitted.scatter_add_(1, path.clamp(min=0).long(), (path >= 0).int())
    seen = (emitted > 0) | (counts >> PROMPT_BIT > 0)
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    return x - frequency * emitted - presence * (emitted > 0)


@kernel
def edit_kernel(
    x_ptr,  # [num_rows, vocab]
    maxima_ptr,  # [num_rows, num_blocks]
    logits_ptr,  # [num_rows, model_vocab]
    seq_idx_ptr,  # [num_rows]
    positions_ptr,  # [num_rows]
    depths_ptr,  # [num_rows]
    recent_ptr,  # [num_rows, window]
    repetition_ptr,  # [num_seqs]
    presence_ptr,  # [num_seqs]
    frequency_ptr,  # [num_seqs]
    min_position_ptr,  # [num_seqs]
    stop_ids_ptr,  # [num_seqs, max_stop]
    bias_ids_ptr,  # [num_seqs, max_bias]
    bias_ptr,  # [num_seqs, max_bias]
    bad_words_ptr,  # [num_seqs, max_words, max_len]
    token_counts_ptr,  # [num_seqs, vocab]
    vocab,
    model_vocab,
    window,
    max_stop,
    max_bias,
    max_words,
    max_len,
    HAS_LISTS: tl.constexpr,  # whether any sequence may have stop ids, biases or bad words
    HAS_COUNTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    seq = tl.load(seq_idx_ptr + row).to(tl.int64)
    recent_end = recent_ptr + (row + 1) * window
    num_blocks = tl.cdiv(vocab, BLOCK_V)
    first = tl.program_id(0) * BLOCKS
    for block in range(first, tl.minimum(first + BLOCKS, num_blocks)):
        offs_v = block * BLOCK_V + tl.arange(0, BLOCK_V)
        mask_v = offs_v < vocab
        x = tl.load(logits_ptr + row * model_vocab + offs_v, mask=mask_v, other=float("-inf"))
        if HAS_LISTS:
            for i in range(max_bias):
                token = tl.load(bias_ids_ptr + seq * max_bias + i)
                x = tl.where(offs_v == token, x + tl.load(bias_ptr + seq * max_bias + i), x)
            if tl.load(positions_ptr + row) + 1 < tl.load(min_position_ptr + seq):
                for i in range(max_stop):
                    x = tl.where(offs_v == tl.load(stop_ids_ptr + seq * max_stop + i), float("-inf"), x)
            for i in range(max_words):
                word_end = bad_words_ptr + (seq * max_words + i + 1) * max_len
                differing = 0
                for back in range(2, max_len + 1):
                    wanted = tl.load(word_end - back)
                    passed = tl.load(recent_end - back + 1, mask=back <= window + 1, other=-1)
                    differing += ((wanted != -1) & (wanted != passed)).to(tl.int32)
                x = tl.where((offs_v == tl.load(word_end - 1)) & (differing == 0), float("-inf"), x)
        if HAS_COUNTS:
            counts = tl.load(token_counts_ptr + seq * vocab + offs_v, mask=mask_v, other=0)
            emitted = counts & 0x3FFFFFFF
            for back in range(1, tl.minimum(tl.load(depths_ptr + row), window) + 1):
                emitted += (offs_v == tl.load(recent_end - back)).to(tl.int32)
            seen = (emitted > 0) | ((counts >> 30) > 0)
            repetition = tl.load(repetition_ptr + seq)
            x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
            x -= tl.load(frequency_ptr + seq) * emitted.to(tl.float32)
            x -= tl.load(presence_ptr + seq) * (emitted > 0).to(tl.float32)
        tl.store(x_ptr + row * vocab + offs_v, x, mask=mask_v)
        tl.store(maxima_ptr + row * num_blocks + block, tl.max(x, axis=0))
