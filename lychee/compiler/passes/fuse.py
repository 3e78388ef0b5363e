"""Fusions: calls that become one call of an op that computes what they do, each value rounded where they round it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from lychee.kernels import gated_linear, gated_linear_int8, linear, linear_int8, swiglu
from lychee.kernels.op import Op
from lychee.kernels.quantized import group_size

from ..program import Call, Program, Value, is_constant
from .effects import may_move

GATED: dict[Op[Any, Any], Op[Any, Any]] = {linear: gated_linear, linear_int8: gated_linear_int8}


def gates_fused(program: Program) -> Program:
    """`swiglu(linear(x, a), linear(x, b))` as `gated_linear(x, a, b)` in swiglu's place.

    Where nothing else reads what the layers give, nothing in between writes what they read, and weights are dense, or
    int8 with a scale per row.
    """
    calls: list[Call | None] = list(program.calls)
    makers = {value: at for at, call in enumerate(program.calls) for value in call.outputs}
    reads = Counter(value.root for call in program.calls for value in call.reads)
    reads.update(value.root for value in program.results)
    for at, call in enumerate(program.calls):
        if call.op is not swiglu or any(reads[v] != 1 or v not in makers for v in call.reads):
            continue
        sources = [makers[value] for value in call.reads]
        behind = all(may_move(program.calls[i], program.calls[i + 1 : at]) for i in sources)
        if behind and (gated := _gated(call, *(program.calls[i] for i in sources))) is not None:
            calls[at] = gated
            for source in sources:
                calls[source] = None
    return replace(program, calls=tuple(call for call in calls if call is not None))


def _gated(call: Call, gate: Call, up: Call) -> Call | None:
    """The three calls as one; None where they are not what one op computes."""
    if gate.op is not up.op or gate.op not in GATED:
        return None
    x, weights = gate.arguments["x"], (gate.arguments["weight"], up.arguments["weight"])
    if not _same(x, up.arguments["x"]) or not all(map(is_constant, weights)):
        return None
    # Weights with scales of groups are made in registers: two of them in one kernel take up to twice the time of two.
    if gate.op is linear_int8 and any(group_size(x.shape[1], weight) != x.shape[1] for weight in weights):
        return None
    biases = {"gate_bias": gate.arguments["bias"], "up_bias": up.arguments["bias"]}
    return Call(GATED[gate.op], {"x": x, "gate": weights[0], "up": weights[1], **biases}, call.outputs)


def _same(first: Value, second: Value) -> bool:
    """Whether two values are the same part of the same memory, read as the same shape."""
    return (first.root, first.offset, first.shape) == (second.root, second.offset, second.shape)
