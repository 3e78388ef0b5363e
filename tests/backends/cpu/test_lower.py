"""The LLVM text: a small one in full, the same every time, accepted and right for every width of vector."""

import hashlib
import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from lychee.backends.cpu.errors import UnsupportedError
from lychee.backends.cpu.lower import lower
from lychee.backends.cpu.target import Target, host
from lychee.backends.cpu.ttir import read
from tests.backends.cpu.stages import func_of, run

DOUBLE = """
#loc = loc(unknown)
"builtin.module"() ({
  "tt.func"() <{sym_name = "double"}> ({
  ^bb0(%p: !tt.ptr<f32>):
    %two = "arith.constant"() <{value = dense<2.000000e+00> : tensor<16xf32>}> : () -> tensor<16xf32>
    %size = "arith.constant"() <{value = 16 : i32}> : () -> i32
    %program = "tt.get_program_id"() <{axis = 0 : i32}> : () -> i32
    %first = "arith.muli"(%program, %size) : (i32, i32) -> i32
    %range = "tt.make_range"() <{end = 16 : i32, start = 0 : i32}> : () -> tensor<16xi32>
    %firsts = "tt.splat"(%first) : (i32) -> tensor<16xi32>
    %o = "arith.addi"(%firsts, %range) : (tensor<16xi32>, tensor<16xi32>) -> tensor<16xi32>
    %ps = "tt.splat"(%p) : (!tt.ptr<f32>) -> tensor<16x!tt.ptr<f32>>
    %at = "tt.addptr"(%ps, %o) : (tensor<16x!tt.ptr<f32>>, tensor<16xi32>) -> tensor<16x!tt.ptr<f32>>
    %x = "tt.load"(%at) <{operandSegmentSizes = array<i32: 1, 0, 0>}> : (tensor<16x!tt.ptr<f32>>) -> tensor<16xf32>
    %y = "arith.mulf"(%x, %two) : (tensor<16xf32>, tensor<16xf32>) -> tensor<16xf32>
    "tt.store"(%at, %y) <{cache = 1 : i32}> : (tensor<16x!tt.ptr<f32>>, tensor<16xf32>) -> ()
    "tt.return"() : () -> ()
  }) : () -> ()
}) : () -> ()
"""
TEXT = """define void @run(ptr %args, i64 %begin, i64 %end, i32 %gx, i32 %gy, i32 %gz) #0 {
start:
  %a0.at = getelementptr i8, ptr %args, i64 0
  %a0 = load ptr, ptr %a0.at, align 8
  %wide.x = zext i32 %gx to i64
  %wide.y = zext i32 %gy to i64
  br label %programs
programs:
  %program = phi i64 [ %begin, %start ], [ %program.next, %next ]
  %more = icmp slt i64 %program, %end
  br i1 %more, label %entry, label %finished
entry:
  %px.wide = urem i64 %program, %wide.x
  %px = trunc i64 %px.wide to i32
  %rest = udiv i64 %program, %wide.x
  %py.wide = urem i64 %rest, %wide.y
  %py = trunc i64 %py.wide to i32
  %pz.wide = udiv i64 %rest, %wide.y
  %pz = trunc i64 %pz.wide to i32
  %t1 = mul i32 16, %px
  br label %head2
head2:
  %i3 = phi i32 [ 0, %entry ], [ %n4, %body2 ]
  %t5 = icmp slt i32 %i3, 16
  br i1 %t5, label %body2, label %done2
body2:
  %t6 = add i32 %t1, %i3
  %t7 = sext i32 %t6 to i64
  %t8 = mul i64 %t7, 4
  %t9 = getelementptr i8, ptr %a0, i64 %t8
  %t10 = load <4 x float>, ptr %t9, align 4
  %t11 = fmul <4 x float> %t10, splat (float 0x4000000000000000)
  store <4 x float> %t11, ptr %t9, align 4
  %n4 = add nuw nsw i32 %i3, 4
  br label %head2
done2:
  br label %next
next:
  %program.next = add i64 %program, 1
  br label %programs
finished:
  ret void
}
attributes #0 = { nounwind "min-legal-vector-width"="128" "prefer-vector-width"="128" }
"""


def test_a_chain_of_elementwise_ops_becomes_one_vector_loop():
    lowered = lower(read(DOUBLE), Target("x86-64", "", 4))
    assert lowered.text == TEXT
    assert lowered.args == ("ptr",)
    assert 1 <= lowered.cost < 100


@triton.jit
def mixed_kernel(y, x, rows, columns, M: tl.constexpr, N: tl.constexpr):
    """Masks, reductions, exp, a product, philox, 16-bit floats, division, gathers, a scan and a carried tile."""
    i, j = tl.arange(0, M), tl.arange(0, N)
    mask = (i < rows)[:, None] & (j < columns)[None, :]
    tile = tl.load(x + i[:, None] * columns + j[None, :], mask=mask, other=float("-inf")).to(tl.float32)
    shifted = tl.exp(tile - tl.max(tile, 1)[:, None])
    soft = tl.where(mask, shifted / tl.sum(shifted, 1)[:, None], 0.0)
    product = tl.dot(soft, tl.trans(soft), input_precision="ieee")
    bits = tl.randint(7, i[:, None] * N + j[None, :])
    total = tl.zeros((M, N), tl.float32)
    for step in range(rows):
        total = total * 0.5 + soft + tl.load(x + (j // 3 + step) % columns)[None, :].to(tl.float32)
    scanned = tl.cumsum((bits & 15).to(tl.float32), 1)
    result = total + scanned + tl.sum(product, 1)[:, None] + bits % 11
    tl.store(y + i[:, None] * columns + j[None, :], result, mask=mask)


ROWS, COLUMNS = 5, 29
SIZES = {"M": 8, "N": 32}


def arguments(dtype=torch.float16):
    torch.manual_seed(0)
    return torch.zeros(ROWS, COLUMNS), torch.randn(ROWS, COLUMNS).to(dtype), ROWS, COLUMNS


def digest():
    text = lower(func_of(mixed_kernel, *arguments(), **SIZES), Target("x86-64", "", 8)).text
    return hashlib.sha256(text.encode()).hexdigest()


def test_the_text_is_the_same_every_time():
    """Objects are found by it: in this process, and in others, whose sets and dicts may come in another order."""
    code = "from tests.backends.cpu.test_lower import digest; print(digest())"
    digests = {digest(), digest()}
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout.strip())
    assert len(digests) == 1


def philox_bits(count):
    from lychee.kernels.philox import philox_words

    offsets = torch.arange(count)
    return philox_words(torch.tensor(7), offsets, *(torch.zeros(count, dtype=torch.int64),) * 3)[0]


def wanted(x):
    x = x.float()
    soft = x.softmax(1)
    bits = philox_bits(ROWS * SIZES["N"]).view(ROWS, SIZES["N"])
    total = torch.zeros(ROWS, COLUMNS)
    j = torch.arange(COLUMNS)
    for step in range(ROWS):
        total = total * 0.5 + soft + x.flatten()[(j // 3 + step) % COLUMNS]
    return total + ((bits & 15).cumsum(1) + bits % 11)[:, :COLUMNS] + (soft @ soft.T).sum(1)[:, None]


def check(target, dtype):
    y, x, *sizes = arguments(dtype)
    run(func_of(mixed_kernel, y, x, *sizes, **SIZES), y, x, *sizes, target=target)
    torch.testing.assert_close(y, wanted(x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16])
def test_vectors_of_any_width_give_the_right_results(lanes, dtype):
    if lanes > max(8, host().lanes):
        pytest.skip("this CPU has no AVX-512")
    check(Target("x86-64-v4" if lanes == 16 else "x86-64-v3", "", lanes), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cpu", ["x86-64", "x86-64-v2"])
def test_code_for_older_cpus_gives_the_right_results(cpu, dtype):
    check(Target(cpu, "", 4, half=False), dtype)


def test_a_cpu_that_cannot_convert_fp16_refuses_it():
    with pytest.raises(UnsupportedError, match="fp16 needs a CPU that converts it"):
        check(Target("x86-64", "", 4, half=False), torch.float16)
