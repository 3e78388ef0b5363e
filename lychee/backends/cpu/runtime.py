"""The native part of a launch: deals a grid's programs out to torch's own threads.

A packet is one launch in memory: a header (the kernel's function, from how many programs on threads pay, the grid),
then 8-byte slots with the arguments. `launch` runs one packet, `replay` a table of them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from . import jit

HEADER = "<Qq3I4x"  # for `struct`: run, least programs for threads, gx, gy, gz

RUNTIME = """
declare void @lychee_gomp_parallel(ptr, ptr, i32, i32)
declare void @lychee_gomp_barrier()
declare i32 @lychee_omp_thread()
declare i32 @lychee_omp_team()

%context = type { ptr, i64, i64, ptr } ; packets, the first to run, their number, two lines for each thread

define internal i64 @size(ptr %packet) alwaysinline {
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
  ret i64 %total
}

define internal i1 @is_shared(ptr %packet) alwaysinline {
  %total = call i64 @size(ptr %packet)
  %least_at = getelementptr i8, ptr %packet, i64 8
  %least = load i64, ptr %least_at
  %many = icmp sge i64 %total, %least
  ret i1 %many
}

define internal ptr @packet(ptr %packets, i64 %i) alwaysinline {
  %at = getelementptr ptr, ptr %packets, i64 %i
  %packet = load ptr, ptr %at
  ret ptr %packet
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

define internal void @alone(ptr %packet) alwaysinline {
  %total = call i64 @size(ptr %packet)
  %any = icmp sgt i64 %total, 0
  br i1 %any, label %some, label %done
some:
  call void @programs(ptr %packet, i64 0, i64 %total)
  br label %done
done:
  ret void
}

define internal ptr @counter(ptr %counters, i64 %thread, i64 %parity) alwaysinline {
  %twice = shl i64 %thread, 1
  %line = add i64 %twice, %parity
  %offset = shl i64 %line, 6
  %at = getelementptr i8, ptr %counters, i64 %offset
  ret ptr %at
}

define internal i64 @first_of(i64 %total, i64 %thread, i64 %team) alwaysinline {
  %product = mul i64 %total, %thread
  %first = udiv i64 %product, %team
  ret i64 %first
}

; A thread takes programs of its own range, three quarters of what is left each time, then of the others' ranges.
define internal void @share(ptr %packet, ptr %counters, i64 %parity, i64 %thread, i64 %team) {
entry:
  %total = call i64 @size(ptr %packet)
  %other = xor i64 %parity, 1
  %old = call ptr @counter(ptr %counters, i64 %thread, i64 %other)
  store i64 0, ptr %old
  br label %victims
victims:
  %v = phi i64 [ 0, %entry ], [ %v_next, %exhausted ]
  %v_more = icmp ult i64 %v, %team
  br i1 %v_more, label %visit, label %done
visit:
  %sum = add i64 %thread, %v
  %owner = urem i64 %sum, %team
  %after = add i64 %owner, 1
  %low = call i64 @first_of(i64 %total, i64 %owner, i64 %team)
  %high = call i64 @first_of(i64 %total, i64 %after, i64 %team)
  %next_at = call ptr @counter(ptr %counters, i64 %owner, i64 %parity)
  br label %look
look:
  %seen = load atomic i64, ptr %next_at monotonic, align 8
  %seen_at = add i64 %low, %seen
  %any = icmp ult i64 %seen_at, %high
  br i1 %any, label %take, label %exhausted
take:
  %left = sub i64 %high, %seen_at
  %quarter = lshr i64 %left, 2
  %chunk = sub i64 %left, %quarter ; a call costs what a small program does
  %taken = atomicrmw add ptr %next_at, i64 %chunk monotonic
  %begin = add i64 %low, %taken
  %some = icmp ult i64 %begin, %high
  br i1 %some, label %work, label %exhausted
work:
  %stop = add i64 %begin, %chunk
  %end = call i64 @llvm.umin.i64(i64 %stop, i64 %high)
  call void @programs(ptr %packet, i64 %begin, i64 %end)
  br label %look
exhausted:
  %v_next = add i64 %v, 1
  br label %victims
done:
  ret void
}

define internal void @worker(ptr %context) {
entry:
  %thread32 = call i32 @lychee_omp_thread()
  %thread = zext i32 %thread32 to i64
  %team32 = call i32 @lychee_omp_team()
  %team = zext i32 %team32 to i64
  %is_first = icmp eq i64 %thread, 0
  %packets = load ptr, ptr %context
  %from_at = getelementptr %context, ptr %context, i32 0, i32 1
  %from = load i64, ptr %from_at
  %count_at = getelementptr %context, ptr %context, i32 0, i32 2
  %count = load i64, ptr %count_at
  %counters_at = getelementptr %context, ptr %context, i32 0, i32 3
  %counters = load ptr, ptr %counters_at
  br label %body
body:
  %i = phi i64 [ %from, %entry ], [ %next, %following ]
  %parity = phi i64 [ 0, %entry ], [ %new_parity, %following ]
  %packet = call ptr @packet(ptr %packets, i64 %i)
  %shared = call i1 @is_shared(ptr %packet)
  br i1 %shared, label %sharing, label %not_shared
sharing:
  call void @share(ptr %packet, ptr %counters, i64 %parity, i64 %thread, i64 %team)
  br label %after
not_shared:
  br i1 %is_first, label %single, label %after
single:
  call void @alone(ptr %packet)
  br label %after
after:
  %toggle = zext i1 %shared to i64
  %new_parity = xor i64 %parity, %toggle
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %count
  br i1 %more, label %peek, label %done
peek:
  %next_packet = call ptr @packet(ptr %packets, i64 %next)
  %next_shared = call i1 @is_shared(ptr %next_packet)
  %either = or i1 %shared, %next_shared
  br i1 %either, label %wait, label %following
wait:
  call void @lychee_gomp_barrier()
  br label %following
following:
  br label %body
done:
  ret void
}

define void @launch(ptr %packet, i32 %threads) {
entry:
  %slot = alloca ptr
  store ptr %packet, ptr %slot
  call void @replay(ptr %slot, i64 1, i32 %threads)
  ret void
}

define void @replay(ptr %packets, i64 %count, i32 %threads) {
entry:
  %team = icmp sgt i32 %threads, 1
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %next, %single ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %body, label %done
body:
  %packet = call ptr @packet(ptr %packets, i64 %i)
  %many = call i1 @is_shared(ptr %packet)
  %fork = and i1 %many, %team
  br i1 %fork, label %all, label %single
single:
  call void @alone(ptr %packet)
  %next = add i64 %i, 1
  br label %head
all:
  %context = alloca %context, align 64
  %lines = shl i32 %threads, 1
  %bytes32 = shl i32 %lines, 6
  %bytes = zext i32 %bytes32 to i64
  %counters = alloca i8, i64 %bytes, align 64
  call void @llvm.memset.p0.i64(ptr %counters, i8 0, i64 %bytes, i1 false)
  store ptr %packets, ptr %context
  %from_at = getelementptr %context, ptr %context, i32 0, i32 1
  store i64 %i, ptr %from_at
  %count_at = getelementptr %context, ptr %context, i32 0, i32 2
  store i64 %count, ptr %count_at
  %counters_at = getelementptr %context, ptr %context, i32 0, i32 3
  store ptr %counters, ptr %counters_at
  call void @lychee_gomp_parallel(ptr @worker, ptr %context, i32 %threads, i32 0)
  br label %done
done:
  ret void
}
"""


# The OpenMP entry points that the text above calls.
ENTRIES = {
    "lychee_gomp_parallel": "GOMP_parallel",
    "lychee_gomp_barrier": "GOMP_barrier",
    "lychee_omp_thread": "omp_get_thread_num",
    "lychee_omp_team": "omp_get_num_threads",
}


def _openmp() -> dict[str, int]:
    """Addresses of ENTRIES in the OpenMP library that torch runs on; nothing if it has none."""
    shipped = Path(torch.__file__).parent.joinpath("lib").glob("lib*omp*.so*")
    mapped = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line)
    for path in dict.fromkeys([*map(str, shipped), *mapped]):
        if path.startswith("/"):
            try:
                library = ctypes.CDLL(path)
                found = {ours: ctypes.cast(library[name], ctypes.c_void_p).value for ours, name in ENTRIES.items()}
            except (OSError, AttributeError):
                continue
            return {ours: address for ours, address in found.items() if address}
    return {}


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

    entries = _openmp()
    for name in ENTRIES:
        llvm.add_symbol(name, entries.get(name, 1))  # not called where there is none
    launch = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int32)
    # The team stays with the parent: a child that called for it, or whose torch did, would wait for ever.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
    replay = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)
    return Native(
        launch(jit.load(RUNTIME, "launch")),
        replay(jit.load(RUNTIME, "replay")),
        torch.get_num_threads if entries else lambda: 1,
    )
