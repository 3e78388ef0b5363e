"""Runs one op's launch on poisoned, guarded memory and compares it with the reference."""

import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from lychee.kernels import Op

GUARD = 4096  # elements each side; wider than the largest BLOCK drawn in tests
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def guarded(
    shape: tuple[int, ...], dtype: torch.dtype, device: Any, fill: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A poisoned (or filled) window inside a larger buffer, and that buffer."""
    poison = float("nan") if dtype.is_floating_point else True if dtype is torch.bool else torch.iinfo(dtype).min + 7
    size = torch.Size(shape).numel()
    buffer = torch.full((size + 2 * GUARD,), poison, dtype=dtype, device=device)
    window = buffer[GUARD : GUARD + size].view(shape)
    if fill is not None:
        window.copy_(fill)
    return window, buffer


def rims(buffer: Tensor) -> Tensor:
    return torch.cat([buffer[:GUARD], buffer[-GUARD:]]).clone()


def embed_inputs(value: Any, buffers: list[tuple[Tensor, Tensor]]) -> Any:
    """A copy of the arguments in which every tensor lies between guard rims."""
    if isinstance(value, Tensor):
        window, buffer = guarded(tuple(value.shape), value.dtype, value.device, value)
        buffers.append((buffer, buffer.clone()))
        return window
    if isinstance(value, dict):
        return {k: embed_inputs(v, buffers) for k, v in value.items()}
    if is_dataclass(value):
        changed = copy.copy(value)
        for f in fields(value):
            object.__setattr__(changed, f.name, embed_inputs(getattr(value, f.name), buffers))
        return changed
    return value


def check_int8_cache(got: Tensor, want: Tensor, rows: Tensor) -> None:
    """The same scales; values within 1, as a number between two steps may be rounded to either."""
    _, num_kv_heads, head_dim = rows.shape
    flat = [cache.flatten(1) for cache in (got, want)]
    values, start = num_kv_heads * head_dim, -(-num_kv_heads * head_dim // 4) * 4
    numbers = [cache[:, :values].int() for cache in flat]
    torch.testing.assert_close(*numbers, rtol=0, atol=1)
    scales = [cache[:, start : start + 4 * num_kv_heads].contiguous().view(torch.float32) for cache in flat]
    torch.testing.assert_close(*scales, rtol=TOLERANCE[rows.dtype], atol=0)


def check_launch(op: Op[Any, Any], inputs: dict[str, Any], dtype: torch.dtype) -> None:
    """Launch equals reference, outputs fully written, guard rims intact, and only declared arguments mutated."""
    ours: list[tuple[Tensor, Tensor]] = []
    theirs: list[tuple[Tensor, Tensor]] = []
    mine, reference_inputs = embed_inputs(inputs, ours), embed_inputs(inputs, theirs)
    want = op.reference(**reference_inputs)
    binding = op.contract.check(mine)
    outputs = [guarded(binding.shape(s), binding.dtype(s), binding.device) for s in op.contract.outputs]
    extra = op.scratch(**mine) if op.scratch else {}
    scratch = [buffer and guarded(*buffer, binding.device) for buffer in extra.values()]
    made = [*outputs, *filter(None, scratch)]
    before = [rims(b) for _, b in made]
    op.launch(*(w for w, _ in outputs), *(pair and pair[0] for pair in scratch), **mine)
    for (_, buffer), rim in zip(made, before, strict=True):
        torch.testing.assert_close(
            rims(buffer), rim, rtol=0, atol=0, equal_nan=True, msg=f"{op.name}: guard rim written"
        )
    wanted = want if isinstance(want, tuple) else () if want is None else (want,)
    assert all(t.is_contiguous() for t in wanted), f"{op.name}: the reference returns a tensor that is not contiguous"
    tol = TOLERANCE[dtype]
    for (got, _), reference in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(got, reference, rtol=tol, atol=tol)
    written = {key for key, spec, _ in op.contract.tensors(mine) if spec.mutated}
    keys = {t.data_ptr(): key for key, _, t in op.contract.tensors(mine)}
    for (buffer, original), (reference_buffer, _) in zip(ours, theirs, strict=True):
        key = keys.get(buffer[GUARD:].data_ptr(), "an argument")
        if key in written and buffer.dtype is torch.int8:
            assert torch.equal(rims(buffer), rims(original)), f"{op.name}: guard rim written"
            check_int8_cache(buffer[GUARD:-GUARD].view(mine[key].shape), reference_inputs[key], mine["k"])
            continue
        expected = reference_buffer if key in written else original
        tight = 0.0 if key not in written else tol
        torch.testing.assert_close(
            buffer,
            expected,
            rtol=tight,
            atol=tight,
            equal_nan=True,
            msg=lambda m, k=key: f"{op.name}: {k} changed\n{m}",
        )
