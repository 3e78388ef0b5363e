"""Triton's IR in generic form becomes objects: values, attributes, regions, successors, and the kernel's own lines."""

import math

import pytest
import torch
import triton
import triton.language as tl

from lychee.backends.cpu.ttir import ReadError, Type, generic_text, read, read_type, walk
from tests.backends.cpu.stages import func_of, generic_text_of

MODULE = """
#loc = loc("/kernels/some file.py":4:0)
#loc7 = loc(callsite(#loc3 at #loc5))
"builtin.module"() ({{
  "tt.func"() <{{function_type = () -> (), sym_name = "k", sym_visibility = "public"}}> ({{
{body}
  }}) {{noinline = false}} : () -> () loc(#loc)
}}) : () -> () loc(#loc)
#loc3 = loc("/triton/standard.py":293:36)
#loc5 = loc("/kernels/some file.py":15:30)
#loc6 = loc("x"(#loc7))
#loc8 = loc("x"("/kernels/some file.py":16:2))
#loc9 = loc(unknown)
"""
BODY = """  ^bb0(%p: !tt.ptr<f32> loc("p"(#loc)), %n: i32 loc("n"(#loc))):
    %0 = "arith.constant"() <{value = dense<0.000000e+00> : tensor<4xf32>}> : () -> tensor<4xf32> loc(#loc9)
    %1:2 = "scf.for"(%n, %n, %n, %0, %n) ({
    ^bb0(%i: i32 loc("i"), %carried: tensor<4xf32> loc("x"), %m: i32 loc("m")):
      %x = "arith.addf"(%carried, %0) <{fastmath = #arith.fastmath<none>}> : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32> loc(#loc6)
      "scf.yield"(%x, %i) : (tensor<4xf32>, i32) -> () loc(#loc9)
    }) : (i32, i32, i32, tensor<4xf32>, i32) -> (tensor<4xf32>, i32) loc(#loc8)
    %c = "arith.cmpi"(%1#1, %n) <{predicate = 4 : i64}> : (i32, i32) -> i1 loc(#loc7)
    "cf.cond_br"(%c, %1#1)[^bb1, ^bb2] <{operandSegmentSizes = array<i32: 1, 1, 0>}> : (i1, i32) -> () loc(#loc9)
  ^bb1(%late: i32 loc(unknown)):  // pred: ^bb0
    "tt.store"(%p, %late) <{boundaryCheck = array<i32>, cache = 1 : i32, evict = 1 : i32}> {tt.flag} : (!tt.ptr<f32>, i32) -> () loc(#loc9)
    "cf.br"()[^bb2] : () -> () loc(#loc9)
  ^bb2:  // 2 preds: ^bb0, ^bb1
    "tt.return"() : () -> () loc(#loc9)
    %9 = "arith.constant"() <{value = 0 : i32}> : () -> i32 loc(#loc9)"""  # noqa: E501


def test_a_function_is_printed_back_in_short():
    assert str(read(MODULE.format(body=BODY))) == (
        """func k(%p: ptr<f32>, %n: i32)
  ^bb0(%p: ptr<f32>, %n: i32)
  %0 = arith.constant value=0.0 : 4xf32
  %1#0, %1#1 = scf.for %n %n %n %0 %n : 4xf32, i32
    ^bb0(%i: i32, %carried: 4xf32, %m: i32)
    %x = arith.addf %carried %0 : 4xf32
    scf.yield %x %i
  %c = arith.cmpi %1#1 %n predicate=4 : i1
  cf.cond_br %c %1#1 ^bb1 ^bb2
  ^bb1(%late: i32)
  tt.store %p %late tt.flag=True
  cf.br ^bb2
  ^bb2()
  tt.return"""
    )


def test_lines_are_the_kernels_own():
    """Through names and calls into the library; nothing where Triton knows nothing."""
    lines = {op.name: op.line for op in walk(read(MODULE.format(body=BODY)).blocks)}
    assert lines["arith.addf"] == "/kernels/some file.py:15"
    assert lines["scf.for"] == "/kernels/some file.py:16"
    assert lines["arith.cmpi"] == "/kernels/some file.py:15"
    assert lines["tt.store"] == ""


def test_values_are_shared_between_definition_and_use():
    func = read(MODULE.format(body=BODY))
    constant, loop, compare, branch = func.blocks[0].ops
    argument = loop.regions[0][0].args[1]
    assert loop.operands[3] is constant.results[0]
    assert loop.regions[0][0].ops[0].operands == [argument, constant.results[0]]
    assert (argument.op, argument.index) == (None, 1)
    assert compare.operands[0] is loop.results[1]
    assert (loop.results[1].op, loop.results[1].index) == (loop, 1)
    assert branch.successors == func.blocks[1:]
    assert branch.attrs["operandSegmentSizes"] == [1, 1, 0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.000000e+00 : f32", 1.0),
        ("-1.500000e-05 : f64", -1.5e-5),
        ("0x7F800000 : f32", math.inf),
        ("0xFF800000 : f32", -math.inf),
        ("0x7FC00000 : f32", math.nan),
        ("0xFC00 : f16", -math.inf),
        ("0x7E00 : f16", math.nan),
        ("0x7F80 : bf16", math.inf),
        ("0xFFC0 : bf16", math.nan),
        ("0x7FF0000000000000 : f64", math.inf),
        ("0x3F800000 : f32", 1.0),
        ("0x3F80 : bf16", 1.0),
        ("3.140630e+00 : bf16", 3.14063),
        ("-7 : i32", -7),
        ("9223372036854775807 : i64", 2**63 - 1),
        ("true", True),
        ("false", False),
        ("dense<0xFF800000> : tensor<8x16xf32>", -math.inf),
        ("dense<-1> : tensor<8xi8>", -1),
        ("dense<true> : tensor<8xi1>", True),
        ("dense<0x7F80> : tensor<4xbf16>", math.inf),
        ("dense<-2.000000e+00> : tensor<4xf16>", -2.0),
    ],
)
def test_constants_of_every_spelling(text, value):
    body = f'    %0 = "arith.constant"() <{{value = {text}}}> : () -> i32\n    "tt.return"() : () -> ()'
    got = read(MODULE.format(body=body)).blocks[0].ops[0].attrs["value"]
    assert type(got) is type(value)
    assert got == value or (math.isnan(got) and math.isnan(value))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("i32", Type((), "i32")),
        ("tensor<4x16xbf16>", Type((4, 16), "bf16")),
        ("!tt.ptr<f16>", Type((), "ptr", "f16")),
        ("!tt.ptr<i8,1>", Type((), "ptr", "i8")),
        ("tensor<8x!tt.ptr<i64>>", Type((8,), "ptr", "i64")),
    ],
)
def test_types(text, want):
    assert read_type(text) == want


def test_what_is_not_the_generic_form_is_refused_where_it_stops():
    with pytest.raises(ReadError, match=r"expected : in Triton's IR, found = nonsense"):
        read(MODULE.format(body='    "tt.return"() = nonsense'))


@triton.jit(noinline=True)
def apart(x):
    return x + 1


@triton.jit
def calling_kernel(p):
    tl.store(p, apart(tl.load(p)))


def test_functions_that_are_not_inlined_are_refused():
    with pytest.raises(ReadError, match=r"calls 1 functions that are not inlined .*remove noinline"):
        func_of(calling_kernel, torch.zeros(1))


@triton.jit
def early_kernel(p, n, N: tl.constexpr):
    if n > 7:
        return
    i = tl.arange(0, N)
    s = 0
    while s < n:
        s += 3
    if s > 4:
        v = i + s
    else:
        v = i
    tl.store(p + i, tl.sum(v, 0) + tl.full((N,), float("-inf"), tl.float32))


def test_this_triton_prints_the_generic_form_and_it_is_read():
    """Generic form is what MLIR prints of a module that does not verify, and not promised: pinned per version."""
    text = generic_text_of(early_kernel, torch.zeros(8), 5, N=8)
    assert '"tt.func"() <{' in text
    func = read(text)
    names = [op.name for op in walk(func.blocks)]
    assert [b.ops[-1].name for b in func.blocks] == ["cf.cond_br", "tt.return", "tt.return"]
    assert func.blocks[0].ops[-1].successors == func.blocks[1:]
    for name in ("scf.while", "scf.condition", "scf.if", "tt.reduce", "tt.reduce.return", "tt.store"):
        assert names.count(name) == 1
    assert -math.inf in [op.attrs["value"] for op in walk(func.blocks) if op.name == "arith.constant"]
    first = early_kernel.fn.__code__.co_firstlineno
    assert {op.line for op in walk(func.blocks) if op.name in ("tt.reduce", "tt.store")} == {f"{__file__}:{first + 12}"}


def test_a_triton_that_prints_otherwise_is_named():
    class Pretty:
        def __init__(self, module):
            self.walk, self.context, self.str = module.walk, module.context, lambda: "module { tt.func ... }"

    def refuse(module):
        with pytest.raises(ReadError, match="does not print invalid modules in MLIR's generic form"):
            generic_text(Pretty(module))
        return ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.backends.cpu.stages.generic_text", refuse)
        assert generic_text_of(early_kernel, torch.zeros(8), 5, N=8) == ""
