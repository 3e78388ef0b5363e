"""Cuts rows or sequences out of an op's inputs, so that the same ones can be run in other company."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lychee.kernels import Op
from lychee.kernels.types import Spec

Inputs = dict[str, Any]
ROWS = ("num_tokens", "num_rows", "num_nodes")


def changed(inputs: Inputs, key: str, value: Any) -> Inputs:
    """The inputs with `argument` or `argument.field` replaced."""
    first, _, field = key.partition(".")
    return {**inputs, first: replace(inputs[first], **{field: value}) if field else value}


def rows_of(op: Op[Any, Any], inputs: Inputs, rows: list[int]) -> Inputs:
    """These rows, in this order; everything that is not per row stays."""
    for key, spec, tensor in list(op.contract.tensors(inputs)):
        if spec.parsed[0][0] in ROWS:
            inputs = changed(inputs, key, tensor[rows].contiguous())
    return inputs


def bounds(inputs: Inputs) -> list[int]:
    cu_rows: Tensor = inputs["paging"].cu_seqlens_q if "paging" in inputs else inputs["tree"].cu_nodes
    return cu_rows.tolist()


def sequences_of(op: Op[Any, Any], inputs: Inputs, seqs: list[int], rows: list[list[int]] | None = None) -> Inputs:
    """These sequences, in this order, with all of their rows or with those given (their places in the sequence)."""
    first = bounds(inputs)
    rows = rows or [list(range(first[s + 1] - first[s])) for s in seqs]
    places = [first[s] + r for s, chosen in zip(seqs, rows, strict=True) for r in chosen]
    counts = torch.tensor([len(chosen) for chosen in rows])

    def cut(key: str, spec: Spec, tensor: Tensor) -> Tensor:
        name, more = spec.parsed[0]
        if more:
            return torch.cat([torch.zeros(1), counts.cumsum(0)]).to(tensor)
        if key.endswith("seq_idx"):
            return torch.arange(len(seqs)).repeat_interleave(counts).to(tensor)
        return tensor[places] if name in ROWS else tensor[seqs] if name == "num_seqs" else tensor

    for key, spec, tensor in list(op.contract.tensors(inputs)):
        inputs = changed(inputs, key, cut(key, spec, tensor).contiguous())
    if "paging" in inputs:
        inputs = changed(inputs, "paging.max_rows", int(counts.max()))
        inputs = changed(inputs, "paging.max_context", int(inputs["paging"].context_lens.max()))
    return inputs


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes()
