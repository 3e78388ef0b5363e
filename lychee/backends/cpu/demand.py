"""Which rows and columns of a product anyone looks at.

If a product reaches memory only through stores whose masks all contain one comparison along its rows, then rows for
which it fails need not be computed, and for the others a mask of the operands that says the same is true.
"""

from __future__ import annotations

from collections.abc import Hashable

from . import elementwise
from .frame import Frame
from .llvm import BYTES
from .memory import whole
from .nests import Term, growth, mask_terms
from .ttir import Op, Value

LAYOUT = ("tt.expand_dims", "tt.broadcast", "tt.splat")


def source(value: Value) -> Hashable:
    """What an index or a scalar is computed from, without its layout: equal for equal computations."""
    op = value.op
    if op is None:
        return value
    if op.name in LAYOUT:
        return source(op.operands[0])
    if op.name == "arith.constant" or op.name == "tt.make_range":
        return (op.name, op.attrs.get("value"), op.attrs.get("start"), op.attrs.get("end"))
    if op.name == "tt.get_program_id":
        return (op.name, op.attrs["axis"])
    if elementwise.supports(op.name) and not op.regions:
        return (op.name, op.attrs.get("predicate"), value.type.elem, *(source(o) for o in op.operands))
    return value


def origin(term: Term) -> Hashable:
    """A comparison along one axis, wherever that axis lies."""
    return source(term.op.results[0])


def _stores(f: Frame, value: Value) -> list[Op]:
    """The stores of what the value becomes, element for element; none if it goes elsewhere too."""
    found: list[Op] = []
    stack = [value]
    while stack:
        here = stack.pop()
        for op in f.uses.get(here, []):
            if op.name == "tt.store" and here is op.operands[1]:
                found.append(op)
            elif elementwise.supports(op.name) and op.results[0].type.shape == value.type.shape:
                stack.append(op.results[0])
            else:
                return []
    return found


def stored_by_columns(f: Frame, value: Value) -> bool:
    """Whether it is a matrix that goes to memory alone, where the elements of a column lie side by side."""
    stores = _stores(f, value) if len(value.type.shape) == 2 else []
    strides = [f.strides.of(op.operands[0]) for op in stores]
    sizes = [BYTES[op.operands[0].type.pointee] for op in stores]
    return bool(stores) and all(s[0] == size != s[1] for s, size in zip(strides, sizes, strict=True))


def watched(f: Frame, value: Value) -> dict[int, frozenset[Hashable]]:
    """For each axis, comparisons in the masks of all stores of what the value becomes; {} if it goes elsewhere."""
    stores = _stores(f, value)
    if not all(len(op.operands) > 2 for op in stores):
        return {}
    found = [_store_terms(f, op.operands[2]) for op in stores]
    axes = range(len(value.type.shape))
    return {a: frozenset.intersection(*(t.get(a, frozenset()) for t in found)) for a in axes} if found else {}


def _store_terms(f: Frame, mask: Value) -> dict[int, frozenset[Hashable]]:
    axes: dict[int, set[Hashable]] = {}
    for term in mask_terms(f, [], [(mask, whole(mask))]):
        if not term.axes:
            for axis in range(len(mask.type.shape)):
                axes.setdefault(axis, set()).add(origin(term))
        elif len(term.axes) == 1:
            axes.setdefault(next(iter(term.axes)), set()).add(origin(term))
    return {axis: frozenset(terms) for axis, terms in axes.items()}


def live_terms(f: Frame, terms: list[Term], result: Value) -> dict[int, list[Term]]:
    """Of the operands' comparisons those along one axis of the result that tell what is looked at."""
    seen = watched(f, result)
    found: dict[int, list[Term]] = {}
    for axis, origins in seen.items():
        mine = [t for t in terms if t.axes <= {axis} and origin(t) in origins and growth(f, t, axis) is not None]
        if mine:
            found[axis] = mine
    return found
