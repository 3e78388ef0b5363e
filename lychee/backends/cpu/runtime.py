"""The native part of a launch: deals a grid's programs out to torch's own threads.

A packet is one launch in memory: a header (the kernel's function, from how many programs on threads pay, the grid),
then 8-byte slots with the arguments. `launch` runs one packet, `replay` a table of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from . import jit

HEADER = "<Qq3I4x"  # for `struct`: run, least programs for threads, gx, gy, gz

RUNTIME = """
declare void @lychee_gomp_parallel(ptr, ptr, i32, i32)

define internal void @worker(ptr %context) {
entry:
  %packet = load ptr, ptr %context
  %total_at = getelementptr i8, ptr %context, i64 8
  %total = load i64, ptr %total_at
  %chunk_at = getelementptr i8, ptr %context, i64 16
  %chunk = load i64, ptr %chunk_at
  %next_at = getelementptr i8, ptr %context, i64 64
  br label %take
take:
  %begin = atomicrmw add ptr %next_at, i64 %chunk monotonic
  %left = icmp slt i64 %begin, %total
  br i1 %left, label %some, label %done
some:
  %stop = add i64 %begin, %chunk
  %end = call i64 @llvm.smin.i64(i64 %stop, i64 %total)
  call void @programs(ptr %packet, i64 %begin, i64 %end)
  br label %take
done:
  ret void
}

define internal void @programs(ptr %packet, i64 %begin, i64 %end) alwaysinline {
  %run = load ptr, ptr %packet
  %gx_at = getelementptr i8, ptr %packet, i64 16
  %gx = load i32, ptr %gx_at
  %gy_at = getelementptr i8, ptr %packet, i64 20
  %gy = load i32, ptr %gy_at
  %gz_at = getelementptr i8, ptr %packet, i64 24
  %gz = load i32, ptr %gz_at
  %args = getelementptr i8, ptr %packet, i64 32
  call void %run(ptr %args, i64 %begin, i64 %end, i32 %gx, i32 %gy, i32 %gz)
  ret void
}

define void @launch(ptr %packet, i32 %threads) {
entry:
  %context = alloca [128 x i8], align 64
  %least_at = getelementptr i8, ptr %packet, i64 8
  %least = load i64, ptr %least_at
  %gx_at = getelementptr i8, ptr %packet, i64 16
  %gx = load i32, ptr %gx_at
  %gy_at = getelementptr i8, ptr %packet, i64 20
  %gy = load i32, ptr %gy_at
  %gz_at = getelementptr i8, ptr %packet, i64 24
  %gz = load i32, ptr %gz_at
  %x = zext i32 %gx to i64
  %y = zext i32 %gy to i64
  %z = zext i32 %gz to i64
  %xy = mul i64 %x, %y
  %total = mul i64 %xy, %z
  %many = icmp sge i64 %total, %least
  %team = icmp sgt i32 %threads, 1
  %fork = and i1 %many, %team
  br i1 %fork, label %all, label %alone
alone:
  %any = icmp sgt i64 %total, 0
  br i1 %any, label %some, label %done
some:
  call void @programs(ptr %packet, i64 0, i64 %total)
  br label %done
all:
  %team64 = zext i32 %threads to i64
  %shares = shl i64 %team64, 3
  %share = udiv i64 %total, %shares
  %chunk = call i64 @llvm.smax.i64(i64 %share, i64 1)
  store ptr %packet, ptr %context
  %total_at = getelementptr i8, ptr %context, i64 8
  store i64 %total, ptr %total_at
  %chunk_at = getelementptr i8, ptr %context, i64 16
  store i64 %chunk, ptr %chunk_at
  %next_at = getelementptr i8, ptr %context, i64 64
  store i64 0, ptr %next_at
  call void @lychee_gomp_parallel(ptr @worker, ptr %context, i32 %threads, i32 0)
  br label %done
done:
  ret void
}

define void @replay(ptr %packets, i64 %count, i32 %threads) {
entry:
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %next, %body ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %body, label %done
body:
  %at = getelementptr ptr, ptr %packets, i64 %i
  %packet = load ptr, ptr %at
  call void @launch(ptr %packet, i32 %threads)
  %next = add i64 %i, 1
  br label %head
done:
  ret void
}
"""


def _gomp() -> int:
    """Address of GOMP_parallel in the OpenMP library that torch runs on, 0 if it has none."""
    shipped = Path(torch.__file__).parent.joinpath("lib").glob("lib*omp*.so*")
    mapped = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line)
    for path in dict.fromkeys([*map(str, shipped), *mapped]):
        if path.startswith("/"):
            try:
                return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value or 0
            except (OSError, AttributeError):
                continue
    return 0


@dataclass(frozen=True)
class Native:
    """`launch(packet, threads)`, `replay(addresses of packets, count, threads)`; `threads()` is the number to name.

    It is torch's own number, always: another would make the OpenMP library build its team of threads anew.
    """

    launch: Callable[[bytes, int], None]
    replay: Callable[[int, int, int], None]
    threads: Callable[[], int]


@cache
def native() -> Native:
    import llvmlite.binding as llvm

    parallel = _gomp()
    llvm.add_symbol("lychee_gomp_parallel", parallel or 1)  # not called where there is none
    launch = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int32)
    replay = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)
    return Native(
        launch(jit.load(RUNTIME, "launch")),
        replay(jit.load(RUNTIME, "replay")),
        torch.get_num_threads if parallel else lambda: 1,
    )
