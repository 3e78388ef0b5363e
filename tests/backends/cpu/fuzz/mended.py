"""Mends Triton's interpreter where it is no oracle.

It adds and multiplies the bit patterns of bf16 and truncates where it should round; a reduction of integers to a
scalar raises where it should wrap around; a comparison of floats passes for a float when it is spread to a tile; and
atomics read broadcast operands beyond their memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np


def widen(bits: np.ndarray) -> np.ndarray:
    """bf16 bit patterns to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(bits.shape)


def narrow(values: np.ndarray) -> np.ndarray:
    """float32 to bf16 bit patterns, to nearest, ties to even; not for NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def mend() -> None:
    """Patches the interpreter of this process."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, ReduceScanOpInterface, TensorHandle, _get_np_dtype

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar == tl.bfloat16:
            return TensorHandle(widen(handle.data), tl.float32)
        return handle

    def mended(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *handles: Any) -> Any:
            *operands, function = handles
            out = method(self, *map(wide, operands), function)
            if out.data.dtype == np.bool_:
                return TensorHandle(out.data, tl.int1)
            if all(h.dtype.scalar != tl.bfloat16 for h in operands):
                return out
            return TensorHandle(narrow(out.data), tl.bfloat16)

        return run

    def mended_cast(self: Any, source: Any, kind: Any) -> Any:
        if source.dtype.scalar == tl.bfloat16 and kind.scalar == tl.bfloat16:
            return source
        if kind.scalar == tl.bfloat16:
            return TensorHandle(narrow(source.data.astype(np.float32)), tl.bfloat16)
        return cast(self, wide(source), kind)

    def mended_dot(self: Any, a: Any, b: Any, total: Any, precision: Any, imprecise: Any) -> Any:
        return dot(self, wide(a), wide(b), total, precision, imprecise)

    def mended_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.dtype.scalar != tl.bfloat16:
            return fma(self, x, y, z)
        return TensorHandle(narrow(fma(self, wide(x), wide(y), wide(z)).data), tl.bfloat16)

    def get_bf16(self: Any, value: float) -> Any:
        return TensorHandle(narrow(np.array([value], np.float32)), tl.bfloat16)

    def to_tensor(self: Any, result: Any, dtype: Any) -> Any:
        if not getattr(result, "shape", ()):
            result = np.asarray(result).reshape(1)
            return tl.tensor(TensorHandle(result.astype(_get_np_dtype(dtype)), dtype.scalar), dtype)
        return wrap(self, result, dtype)

    def solid(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *handles: Any) -> Any:
            return method(self, *(_contiguous(h) if isinstance(h, TensorHandle) else h for h in handles))

        return run

    wrap = ReduceScanOpInterface.to_tensor
    ReduceScanOpInterface.to_tensor = to_tensor
    builder: Any = InterpreterBuilder
    builder.get_bf16 = get_bf16
    cast, dot, fma = builder.cast_impl, builder.create_dot, builder.create_fma
    builder.binary_op = mended(builder.binary_op)
    builder.unary_op = mended(builder.unary_op)
    builder.cast_impl = mended_cast
    builder.create_dot = mended_dot
    builder.create_fma = mended_fma
    builder.create_atomic_rmw = solid(builder.create_atomic_rmw)
    builder.create_atomic_cas = solid(builder.create_atomic_cas)


def _contiguous(handle: Any) -> Any:
    return replace(handle, data=np.ascontiguousarray(handle.data))
