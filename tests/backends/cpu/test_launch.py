"""The grid over threads, packets and their refusals, bound launches and tables of them."""

import ctypes
import gc
import itertools
import struct
import subprocess
import sys
import weakref

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

from lychee.backends.cpu import activated, jit, runtime
from lychee.backends.cpu.launch import Launch, Launcher, Table
from tests.kernels.add_kernel import add_kernel

# Every program adds one to its element of the first array and leaves its thread's id in the second; each call sleeps.
COUNT = """
declare i64 @pthread_self()
declare i32 @usleep(i32)
define void @run(ptr %args, i64 %begin, i64 %end, i32 %gx, i32 %gy, i32 %gz) {
entry:
  %counts = load ptr, ptr %args
  %threads_at = getelementptr i8, ptr %args, i64 8
  %threads = load ptr, ptr %threads_at
  %pause_at = getelementptr i8, ptr %args, i64 16
  %pause = load i32, ptr %pause_at
  %slept = call i32 @usleep(i32 %pause)
  %self = call i64 @pthread_self()
  br label %head
head:
  %i = phi i64 [ %begin, %entry ], [ %next, %body ]
  %more = icmp slt i64 %i, %end
  br i1 %more, label %body, label %done
body:
  %count_at = getelementptr i64, ptr %counts, i64 %i
  %old = atomicrmw add ptr %count_at, i64 1 monotonic
  %thread_at = getelementptr i64, ptr %threads, i64 %i
  store i64 %self, ptr %thread_at
  %next = add i64 %i, 1
  br label %head
done:
  ret void
}
"""
# The same, but only calls that hold the first program sleep.
SLOW_START = COUNT.replace("usleep(i32 %pause)", "usleep(i32 %rest)").replace(
    "  %slept", "  %late = icmp ne i64 %begin, 0\n  %rest = select i1 %late, i32 0, i32 %pause\n  %slept"
)
PROTOTYPE = struct.Struct(runtime.HEADER + "QQi4x")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def count(grid, least=2, pause=0, threads=None):
    """(how often each program ran, the threads they ran on)"""
    total = grid[0] * grid[1] * grid[2]
    counts, ids = torch.zeros(2, max(total, 1), dtype=torch.int64)
    packet = PROTOTYPE.pack(jit.load(COUNT), least, *grid, counts.data_ptr(), ids.data_ptr(), pause)
    native = runtime.native()
    native.launch(packet, native.threads() if threads is None else threads)
    return counts.tolist()[:total], set(ids.tolist()[:total])


@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 1, 1), (3, 5, 7), (16, 1, 1), (17, 1, 1), (1000, 1, 1), (1, 1, 333)])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_program_runs_once(grid, threads):
    counts, _ = count(grid, threads=threads)
    assert set(counts) == {1}


@pytest.mark.parametrize("grid", [(0, 4, 4), (4, 0, 4), (4, 4, 0), (0, 0, 0)])
@pytest.mark.parametrize("least", [0, 2])
def test_an_empty_axis_runs_nothing(grid, least, two_threads):
    assert count(grid, least=least) == ([], set())
    x = torch.zeros(4)
    add_kernel[grid](x, torch.ones(4), 4, BLOCK=4)
    assert x.tolist() == [0.0] * 4


def test_the_rest_of_a_slow_threads_programs_is_taken_by_others(two_threads):
    """The call with the first program, which has the first 24 of a range of 32, sleeps; another runs the last 8."""
    counts, ids = torch.zeros(2, 64, dtype=torch.int64)
    packet = PROTOTYPE.pack(jit.load(SLOW_START), 2, 64, 1, 1, counts.data_ptr(), ids.data_ptr(), 200_000)
    native = runtime.native()
    native.launch(packet, native.threads())
    assert counts.tolist() == [1] * 64
    assert len(set(ids[:24].tolist())) == 1
    assert ids[0] not in ids[24:32]


def test_torchs_threads_run_a_grid_that_is_worth_it(two_threads):
    # Where other programs keep the cores busy, a thread may come too late to find anything left.
    assert any(len(count((64, 1, 1), least=64, pause=2000)[1]) == 2 for _ in range(20))
    assert ctypes.CDLL(None).pthread_self() is not None
    _, ids = count((63, 1, 1), least=64, pause=2000)
    assert len(ids) == 1


def test_the_number_of_threads_is_torchs(two_threads):
    torch.set_num_threads(1)
    _, ids = count((64, 1, 1), pause=1000)
    assert len(ids) == 1


def test_threads_pay_from_a_number_of_programs_that_falls_with_their_cost():
    def least(cost):
        src = type("Source", (), {"signature": {}})()
        metadata = type("Metadata", (), {"name": "k", "args": [], "cost": cost})()
        return Launcher(src, metadata).least

    assert least(10**9) == 2
    assert least(1) > least(100) > least(10_000) >= 2
    assert least(0) == least(1)


@triton.jit
def axes_kernel(out_ptr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    nx, ny, nz = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
    at = (z * ny + y) * nx + x
    tl.store(out_ptr + at, x + 100 * y + 10_000 * z + 1_000_000 * nz)


@pytest.mark.parametrize("threads", [1, 2])
def test_programs_know_their_place_in_the_grid(threads, two_threads):
    torch.set_num_threads(threads)
    out = torch.zeros(4, 3, 5, dtype=torch.int32)
    with activated():
        axes_kernel[(5, 3, 4)](out)
    z, y, x = torch.meshgrid(*map(torch.arange, out.shape), indexing="ij")
    assert torch.equal(out, (x + 100 * y + 10_000 * z + 4_000_000).int())


@triton.jit
def kinds_kernel(out_ptr, a, b, c, d, pair, e: tl.float64, f: tl.float16, g: tl.int8, h: tl.bfloat16):
    tl.store(out_ptr + 0, a.to(tl.float64))
    tl.store(out_ptr + 1, b.to(tl.float64))
    tl.store(out_ptr + 2, c.to(tl.float64))
    tl.store(out_ptr + 3, d.to(tl.float64))
    tl.store(out_ptr + 4, tl.load(pair[0]).to(tl.float64))
    tl.store(out_ptr + 5, pair[1].to(tl.float64))
    tl.store(out_ptr + 6, e)
    tl.store(out_ptr + 7, f.to(tl.float64))
    tl.store(out_ptr + 8, g.to(tl.float64))
    tl.store(out_ptr + 9, h.to(tl.float64))


def test_arguments_of_every_kind_arrive():
    out = torch.zeros(10, dtype=torch.float64)
    pair = (torch.tensor([2.5]), -7)
    with activated():
        kinds_kernel[(1,)](out, -5, 1 << 40, True, 0.5, pair, 0.1, 0.1, -128, 0.1)
    assert out.tolist() == [-5, float(1 << 40), 1, 0.5, 2.5, -7, 0.1, 0.0999755859375, -128, 0.10009765625]


def test_tensors_elsewhere_are_refused():
    with activated(), pytest.raises(TypeError, match="kinds_kernel: out_ptr is on meta, must be on the CPU"):
        kinds_kernel[(1,)](
            torch.zeros(9, dtype=torch.float64, device="meta"), 5, 6, True, 0.5, (torch.zeros(1), 3), 0.1, 1.5, 8, 1.0
        )


def test_a_number_that_does_not_fit_is_refused():
    with activated(), pytest.raises(TypeError, match=r"kinds_kernel: grid .* with .*g=128.* cannot be passed"):
        kinds_kernel[(1,)](
            torch.zeros(9, dtype=torch.float64), 5, 6, True, 0.5, (torch.zeros(1), 3), 0.1, 1.5, 128, 1.0
        )


def test_a_negative_grid_is_refused():
    with activated(), pytest.raises(TypeError, match=r"axes_kernel: grid \(-1, 1, 1\)"):
        axes_kernel[(-1,)](torch.zeros(9, dtype=torch.int32))


def test_launch_hooks_run_around_a_launch(monkeypatch):
    calls = []
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: calls.append("enter"))
    monkeypatch.setattr(knobs.runtime, "launch_exit_hook", lambda metadata: calls.append("exit"))
    with activated():
        axes_kernel[(1,)](torch.zeros(1, dtype=torch.int32))
    assert calls == ["enter", "exit"]


def test_a_table_runs_its_launches_in_order():
    x, y, z = torch.tensor([1.0, 2.0]), torch.zeros(2), torch.zeros(2)
    first = add_kernel.bind((1,), y, x, 2, BLOCK=2)
    second = add_kernel.bind((1,), z, y, 2, BLOCK=2)
    Table([first, second, first]).replay()
    assert (y.tolist(), z.tolist()) == ([2.0, 4.0], [1.0, 2.0])
    Table([]).replay()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_launches_of_a_table_see_what_those_before_wrote(threads, two_threads):
    """Launches that threads share follow each other and launches of one thread, in every order."""
    torch.set_num_threads(threads)
    x, y, z = torch.ones(1000), torch.zeros(1000), torch.zeros(1000)
    there, back = add_kernel.bind((250,), y, x, 1000, BLOCK=4), add_kernel.bind((250,), z, y, 1000, BLOCK=4)
    shared = [Launch(_from(launch, 2), [x, y, z]) for launch in (there, back)]
    for mix in itertools.product([(there, back), shared], repeat=3):
        y.zero_()
        z.zero_()
        Table([launch for pair in mix for launch in pair] * 20).replay()
        assert (set(y.tolist()), set(z.tolist())) == ({60.0}, {1830.0})


def _from(launch, least):
    """The packet of a launch that threads share from that many programs on."""
    packet = bytearray(launch._packet.raw)
    struct.pack_into("<q", packet, 8, least)
    return bytes(packet)


def test_a_bound_launch_reads_its_tensors_anew_each_time():
    x, y = torch.ones(2), torch.zeros(2)
    launch = add_kernel.bind((1,), y, x, 2, BLOCK=2)
    assert y.tolist() == [0.0, 0.0]
    launch()
    x.fill_(10)
    launch()
    assert y.tolist() == [11.0, 11.0]


def test_a_table_keeps_its_tensors():
    y, x = torch.zeros(2), torch.ones(2)
    kept = weakref.ref(x)
    table = Table([add_kernel.bind((1,), y, x, 2, BLOCK=2)])
    del x
    gc.collect()
    assert kept() is not None
    del table
    gc.collect()
    assert kept() is None


def test_a_table_uses_threads(two_threads):
    counts, ids = torch.zeros(2, 64, dtype=torch.int64)
    packet = PROTOTYPE.pack(jit.load(COUNT), 2, 64, 1, 1, counts.data_ptr(), ids.data_ptr(), 1000)
    Table([Launch(packet, [counts, ids])] * 2).replay()
    assert set(counts.tolist()) == {2}
    assert len(set(ids.tolist())) == 2


def test_a_forked_child_runs_on_one_thread_and_does_not_wait_for_its_parent_s():
    script = """
import os, torch
torch.set_num_threads(2)
from lychee.kernels import linear
x, weight = torch.randn(16, 256), torch.randn(4096, 256)
want = linear(x, weight)
if (child := os.fork()) == 0:
    os._exit(0 if torch.equal(linear(x, weight), want) else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(linear(x, weight), want)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
