"""From Triton IR to an LLVM module: one function that runs a range of the grid's programs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from . import control, order
from .errors import UnsupportedError
from .frame import Frame
from .llvm import BYTES, Val, register
from .target import Target
from .ttir import Func, Op, Value, walk

__all__ = ["Lowered", "UnsupportedError", "lower"]


@dataclass(frozen=True)
class Lowered:
    """`text` defines `void @run(ptr args, i64 begin, i64 end, i32 gx, i32 gy, i32 gz)`, programs numbered x first.

    `args` are the types of the 8-byte slots that the first argument points to; `cost` the estimated nanoseconds of one
    program.
    """

    text: str
    args: tuple[str, ...]
    cost: int


@contextmanager
def _deep_recursion() -> Iterator[None]:
    """Evaluation follows a kernel's longest chain of ops."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, 50_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def lower(func: Func, target: Target) -> Lowered:
    """Raises UnsupportedError for a kernel that uses what the backend does not know."""
    with _deep_recursion():
        plan = order.analyse(func)
        f = Frame(target, plan.strides, set(plan.forced), _uses(func))
        args = tuple(a.type.elem for a in func.args)
        for number, argument in enumerate(func.args):
            f.env[argument] = Val(argument.type.elem, f"%a{number}")
        control.function(f, func.blocks, "next")
    return Lowered(_module(f, args), args, max(1, int(f.b.cost)))


def _uses(func: Func) -> dict[Value, list[Op]]:
    uses: dict[Value, list[Op]] = {}
    for op in walk(func.blocks):
        for operand in op.operands:
            uses.setdefault(operand, []).append(op)
    return uses


def _attributes(target: Target) -> str:
    bits = 32 * target.lanes
    return f'nounwind "min-legal-vector-width"="{bits}" "prefer-vector-width"="{bits}"'


def _module(f: Frame, args: tuple[str, ...]) -> str:
    head = ["define void @run(ptr %args, i64 %begin, i64 %end, i32 %gx, i32 %gy, i32 %gz) #0 {", "start:"]
    for number, elem in enumerate(args):
        kind = "i8" if elem == "i1" else "float" if elem in ("f16", "bf16") else register(elem)
        name = f"%a{number}"
        head.append(f"  {name}.at = getelementptr i8, ptr %args, i64 {8 * number}")
        loaded = f"{name}.raw" if elem == "i1" else name
        head.append(f"  {loaded} = load {kind}, ptr {name}.at, align {min(8, BYTES.get(elem, 4))}")
        if elem == "i1":
            head.append(f"  {name} = trunc i8 {loaded} to i1")
    head += [
        *f.b.buffers,
        "  %wide.x = zext i32 %gx to i64",
        "  %wide.y = zext i32 %gy to i64",
        "  br label %programs",
        "programs:",
        "  %program = phi i64 [ %begin, %start ], [ %program.next, %next ]",
        "  %more = icmp slt i64 %program, %end",
        "  br i1 %more, label %entry, label %finished",
        "entry:",
        "  %px.wide = urem i64 %program, %wide.x",
        "  %px = trunc i64 %px.wide to i32",
        "  %rest = udiv i64 %program, %wide.x",
        "  %py.wide = urem i64 %rest, %wide.y",
        "  %py = trunc i64 %py.wide to i32",
        "  %pz.wide = udiv i64 %rest, %wide.y",
        "  %pz = trunc i64 %pz.wide to i32",
    ]
    tail = ["next:", "  %program.next = add i64 %program, 1", "  br label %programs", "finished:", "  ret void", "}"]
    declares = sorted(f.b.declares)
    attributes = f"attributes #0 = {{ {_attributes(f.target)} }}"
    return "\n".join([*declares, *f.b.functions.values(), *head, *f.b.lines, *tail, attributes, ""])
