"""Checks and small measurements of a device that need nothing but lychee, torch and Triton.

    python -m bench.gpu_checks {kernels,rows,rooflines,launches} [--small] [--json FILE]

kernels: every op against its reference, in bf16. rows: a row's bits in batches of every size are those it has alone.
rooflines: products and attention at the shapes of real models, against what the device was measured to do. launches:
what a launch costs the host. Exit code 1 where a check fails. `--small`: little of it, at small sizes, as on a CPU.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.ops import measure_peak, time_op
from bench.parser import Parser
from bench.random_model import SHAPES
from lychee.kernels import OPS, Op, rms_norm
from lychee.kernels.aot import DTYPES

Record = dict[str, Any]
MODELS = ("llama-2-7b", "llama-3.1-8b", "llama-3.2-1b")
PRODUCTS = {"bf16": "linear", "int8": "linear_int8", "int4": "linear_int4"}
SMALL = {"hidden": 64, "in_features": 128, "out_features": 96, "vocab": 300, "model_vocab": 300, "max_context": 70}
SMALL |= {"num_tokens": 3, "num_rows": 3, "intermediate": 64, "num_slots": 64, "num_positions": 64, "max_nodes": 4}
ERROR = {"bfloat16": 2e-2, "float32": 1e-4}  # of the largest element, which rounding alone may make


def kernels(device: str, dtype: str, small: bool) -> Iterator[Record]:
    """Launches beside references, at typical sizes and at odd ones."""
    for op in OPS.values():
        for sizes in ({},) if small else ({}, {"num_tokens": 1}, {"num_tokens": 37, "num_rows": 37}):
            used = {**op.typical, **_taken(op, SMALL if small else sizes)}
            if not small:  # a reference may need many times the memory of the op
                used |= _taken(op, {"model_vocab": 4096, "vocab": 4096, "num_seqs": 4, "max_context": 300})
            torch.manual_seed(0)
            arguments = op.contract.arguments((), op.sample(DTYPES[dtype], device, **used))
            want, got = (_tensors(face(**_copied(arguments))) for face in (op.reference, op))
            error = max((_error(a, b) for a, b in zip(want, got, strict=True)), default=0.0)
            yield {"op": op.name, "sizes": used, "error": error, "ok": error <= ERROR[dtype]}


def rows(device: str, dtype: str, small: bool) -> Iterator[Record]:
    """Products of 1 to 64 rows: the first row's bits, and the last's, are those that it has alone."""
    hidden, width = (64, 96) if small else (4096, 11008)
    for name, count in product(PRODUCTS.values(), (2, 7, 16, 17, 33, 64)):
        op = OPS[name]
        sizes = _taken(op, {"num_tokens": count, "in_features": 2 * hidden, "out_features": width})
        torch.manual_seed(0)
        arguments = op.contract.arguments((), op.sample(DTYPES[dtype], device, **{**op.typical, **sizes}))
        x, whole = arguments["x"], op(**arguments)
        same = all(
            torch.equal(whole[row], op(**{**arguments, "x": x[row : row + 1].contiguous()})[0])
            for row in (0, count // 2, count - 1)
        )
        yield {"op": name, "rows": count, "ok": same}


def rooflines(device: str, dtype: str, small: bool) -> Iterator[Record]:
    """Each distinct product of each model at one row and at 16, then attention; fractions of the floor."""
    budget = 0.0 if small else 0.08
    peak = measure_peak(device, [dtype], 0.0 if small else 0.5)
    yield {"peak": asdict(peak), "ok": True}
    for model in ("tiny",) if small else MODELS:
        config = SHAPES[model]
        hidden, ffn = config["hidden_size"], config["intermediate_size"]
        kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
        shapes = dict.fromkeys([(hidden, hidden), (hidden, kv), (hidden, ffn), (ffn, hidden)])
        for (kind, name), (wide, out), count in product(PRODUCTS.items(), shapes, (1, 16)):
            sizes = {"num_tokens": count, "in_features": wide, "out_features": out}
            found = asdict(time_op(OPS[name], dtype, sizes, device, peak, budget))
            yield {"model": model, "format": kind, **found, "ok": True}
        head = {"num_tokens": 1, "in_features": hidden, "out_features": config["vocab_size"]}
        for name in ("lm_head", "lm_head_int8"):
            yield {
                "model": model,
                "format": name,
                **asdict(time_op(OPS[name], dtype, head, device, peak, budget)),
                "ok": True,
            }
        heads = config["num_key_value_heads"]
        context = {"num_seqs": 1, "max_nodes": 1, "max_context": 64 if small else 2048, "num_kv_heads": heads}
        context |= {
            "group": config["num_attention_heads"] // heads,
            "head_dim": hidden // config["num_attention_heads"],
        }
        found = asdict(time_op(OPS["attention"], dtype, context, device, peak, budget))
        yield {"model": model, "format": "-", **found, "ok": True}


def launches(device: str, dtype: str, small: bool) -> Iterator[Record]:
    """Microseconds of the host, and of the device from the first to the last, per launch of a small op."""
    times = 50 if small else 2000
    x, weight = (
        torch.ones(1, 64, dtype=DTYPES[dtype], device=device),
        torch.ones(64, dtype=DTYPES[dtype], device=device),
    )
    rms_norm(x, weight, 1e-5)
    _wait(device)
    started = time.perf_counter()
    for _ in range(times):
        rms_norm(x, weight, 1e-5)
    host = time.perf_counter() - started
    _wait(device)
    whole = time.perf_counter() - started
    yield {"op": "rms_norm", "host_us": 1e6 * host / times, "whole_us": 1e6 * whole / times, "ok": True}


CHECKS: dict[str, Callable[[str, str, bool], Iterator[Record]]] = {
    "kernels": kernels,
    "rows": rows,
    "rooflines": rooflines,
    "launches": launches,
}


def _taken(op: Op[Any, Any], sizes: dict[str, int]) -> dict[str, int]:
    return {axis: size for axis, size in sizes.items() if axis in op.axes}


def _tensors(result: Any) -> list[Tensor]:
    return [] if result is None else [result] if isinstance(result, Tensor) else list(result)


def _copied(arguments: dict[str, Any]) -> dict[str, Any]:
    """Apart from each other: an op may write what it is given."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in arguments.items()}


def _error(want: Tensor, got: Tensor) -> float:
    """Of floats the largest difference, as a share of the largest element; of integers the share that differs."""
    if not want.is_floating_point():
        return float((want != got).double().mean())
    a, b = want.double().nan_to_num(0, 0, 0), got.double().nan_to_num(0, 0, 0)
    if not torch.equal(want.isinf(), got.isinf()):
        return float("inf")
    return float((a - b).abs().max() / a.abs().max().clamp(min=1e-9)) if a.numel() else 0.0


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> int:
    p = Parser(__doc__)
    p.add_argument("check", choices=CHECKS)
    p.add_argument("--small", action="store_true")
    p.add_argument("--json", type=Path, metavar="FILE")
    args = p.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    records: list[Record] = []
    for record in CHECKS[args.check](device, "bfloat16" if device == "cuda" else "float32", args.small):
        records.append(record)
        print(json.dumps(record), flush=True)
        if args.json:
            args.json.write_text(json.dumps(records) + "\n", encoding="utf-8")
    return 0 if all(record["ok"] for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
