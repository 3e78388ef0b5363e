"""Loop nests over tiles: which axis the vector lanes run along, and where masks are provably true.

A mask is a conjunction of comparisons. A comparison `index < bound`, whose index grows along the lanes and whose bound
does not, is true for a prefix of the lanes: a loop over them splits into a part where it is true, compiled without it,
and the rest, where lanes are masked. Anything else is masked throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .frame import Frame
from .llvm import BYTES, Val, integer
from .shapes import UNKNOWN, Place, operand_places, plus
from .ttir import Op, Value

LESS = {2: 0, 3: 1}  # arith.cmpi predicate: what to add to the bound (slt, sle)
GREATER = {4: 0, 5: 1}  # sgt, sge
ROUND = 4  # vectors that one trip of a loop of known length takes
Body = Callable[[list[list[Val]]], None]


@dataclass(frozen=True)
class Term:
    """A comparison (or one scalar condition) inside masks, and which axis of the nest each of its axes follows."""

    op: Op
    place: Place

    @property
    def axes(self) -> frozenset[int]:
        return frozenset(p for p in self.place if p is not None)


def pulled(f: Frame, roots: Sequence[tuple[Value, Place]]) -> Iterator[tuple[Value, Place]]:
    """Every tile that evaluating the roots computes or reads, once for each way its axes follow the nest's."""
    seen: set[tuple[Value, Place]] = set()
    stack = list(reversed(roots))
    while stack:
        value, place = stack.pop()
        if (value, place) in seen or not value.type.is_tile:
            continue
        seen.add((value, place))
        yield value, place
        if value in f.inductions and value not in f.buffers:
            stack.append((f.inductions[value].initial, place))
        elif value not in f.buffers and value.op is not None:
            stack.extend(operand_places(value.op, place))


def mask_terms(
    f: Frame,
    roots: Sequence[tuple[Value, Place]],
    masks: Sequence[tuple[Value, Place]],
    others: Sequence[tuple[Value, Place]] = (),
) -> list[Term]:
    """The comparisons inside the masks given and the masks of all loads pulled.

    `others` are evaluated in the same nest, though not where the comparisons are to be proven.
    """
    found: dict[Term, None] = {}

    def descend(value: Value, place: Place) -> None:
        op = value.op
        if op is None or value in f.buffers or not value.type.is_tile:
            return
        if op.name == "arith.cmpi":
            if UNKNOWN not in place and f.strides.decided(op) is None:
                found[Term(op, place)] = None
        elif op.name == "tt.splat":
            found[Term(op, (None,) * len(place))] = None
        elif op.name in ("arith.andi", "tt.broadcast", "tt.expand_dims", "tt.trans"):
            for operand, where in operand_places(op, place):
                descend(operand, where)

    for value, place in masks:
        descend(value, place)
    places: dict[Value, set[Place]] = {}
    for value, place in pulled(f, [*roots, *masks]):
        op = value.op
        places.setdefault(value, set()).add(place if op is None or op.name != "tt.splat" else ())
        if op is not None and op.name == "tt.load" and value not in f.buffers and has_mask(op):
            descend(op.operands[1], place)
    # What is proven is proven for an op, so an op that also stands elsewhere in the nest must not be.
    for value, place in pulled(f, others):
        if value in places:
            places[value].add(place if value.op is None or value.op.name != "tt.splat" else ())
    return [t for t in found if len(places.get(t.op.results[0], ())) == 1]


def has_mask(op: Op) -> bool:
    return len(op.operands) > 1


def growth(f: Frame, term: Term, axis: int) -> int | None:
    """0 if the comparison is uniform along the axis, its index's step if it is a prefix, None if unprovable."""
    if axis not in term.axes:
        return 0
    if term.place.count(axis) > 1:
        return None
    dim = term.place.index(axis)
    low, high = (f.strides.of(o)[dim] for o in term.op.operands)
    if low == 0 and high == 0:
        return 0
    predicate = term.op.attrs["predicate"]
    if predicate in GREATER:
        low, high = high, low
    elif predicate not in LESS:
        return None
    return low if high == 0 and isinstance(low, int) and low > 0 else None


def term_index(term: Term, index: Sequence[Val | None]) -> tuple[Val, ...]:
    """The comparison's own index at a place of the nest; axes that are None stand at 0."""
    return tuple(integer(0) if p is None else index[p] or integer(0) for p in term.place)


def holds_for(f: Frame, term: Term, index: Sequence[Val | None], axis: int, size: int) -> str:
    """How many of the first `size` places along the axis the comparison is true for, an i32; growth is not None."""
    b, step = f.b, growth(f, term, axis)
    here = term_index(term, index)
    if step == 0:
        value = f.at(term.op.results[0], here, 0)
        if value.literal is not None:
            return str(size if value.literal else 0)
        return b.op(f"select i1 {value.ref}, i32 {size}, i32 0")
    swap = term.op.attrs["predicate"] in GREATER
    low, bound = (f.at(o, here, 0) for o in (term.op.operands[::-1] if swap else term.op.operands))
    extra = {**LESS, **GREATER}[term.op.attrs["predicate"]]
    if bound.literal is not None and low.literal is not None:
        return str(min(size, max(0, -((low.literal - bound.literal - extra) // (step or 1)))))
    x, y = (b.widen(v.ref, v.elem) for v in (bound, low))
    if bound.elem == "i64":
        room = b.call("i64", "llvm.ssub.sat.i64", ("i64", x), ("i64", y))
    else:
        room = b.sub(x, y, "i64")
    room = b.call("i64", "llvm.sadd.sat.i64", ("i64", room), ("i64", str(extra))) if extra else room
    room = b.call("i64", "llvm.smax.i64", ("i64", room), ("i64", "0"))
    room = b.call("i64", "llvm.smin.i64", ("i64", room), ("i64", str(size * (step or 1))))
    if step != 1:
        room = b.op(f"udiv i64 {b.add(room, str((step or 1) - 1), 'i64')}, {step}")
    return b.op(f"trunc i64 {room} to i32")


def prefix(f: Frame, terms: Sequence[Term], rows: Sequence[Sequence[Val | None]], axis: int, size: int) -> str:
    """The places along the axis for which all terms hold in all rows."""
    cases = {(term, term_index(term, row)): row for term in terms for row in rows}
    limits = [holds_for(f, term, row, axis, size) for (term, _), row in cases.items()]
    limit = limits[0]
    for other in limits[1:]:
        limit = f.b.least(limit, other)
    return limit


def width(f: Frame, size: int) -> int:
    return min(f.target.lanes, size)


def lane_index(at: Val, lanes: int) -> Val:
    """`lanes` consecutive places from a base."""
    return Val(at.elem, at.ref, step="1", align=at.align) if lanes > 1 else at


def sweep(
    f: Frame,
    terms: Sequence[Term],
    index: list[Val | None],
    axis: int,
    size: int,
    body: Body,
    *,
    lanes: int = 0,
    unroll: int = 1,
    start: int = 0,
    stop: str = "",
    rows: Sequence[Sequence[Val | None]] = (),
    whole: bool = False,
) -> None:
    """Run `body` over the axis, `unroll` vectors at a time; it gets their indices.

    Lanes are the target's by default, or as many as the axis has. `stop` (an i32) ends the masked part early. Terms
    must hold in all `rows`, by default in `index` alone. `whole` compiles a loop of known length for the case that they
    hold everywhere.
    """
    lanes = lanes or width(f, size)
    step = lanes * unroll
    usable = [t for t in terms if growth(f, t, axis) is not None]

    def run(at: Val) -> None:
        places = [plus(f.b, at, integer(u * lanes), 0) for u in range(unroll)]
        body([[lane_index(p, lanes) if d == axis else i or integer(0) for d, i in enumerate(index)] for p in places])

    def everywhere() -> None:
        """The loop without masks."""
        trips = next(n for n in (ROUND, 2, 1) if (whole or n == 1) and (size - start) % (n * step) == 0)
        with f.loop(str(start), str(size), trips * step) as at:
            for trip in range(trips):
                run(plus(f.b, at, integer(trip * step), 0))

    if start >= size:
        return
    if not usable and not stop:
        everywhere()
        return
    if not usable:
        with f.loop(str(start), stop, step) as at:
            run(at)
        return
    b = f.b
    limit = prefix(f, usable, rows or [index], axis, size)
    proven = frozenset(t.op for t in usable)

    def masked() -> None:
        full = b.op(f"and i32 {limit}, {-step}")
        if start:
            full = b.call("i32", "llvm.smax.i32", ("i32", full), ("i32", str(start)))
        with f.loop(str(start), full, step, trips=(size - start) / step) as at, f.scope(proven):
            run(Val("i32", at.ref, align=step))
        with f.loop(full, stop or str(size), step, trips=1) as at:
            run(Val("i32", at.ref, align=step))

    if size > step and not whole:
        masked()
        return
    all_hold = b.op(f"icmp sge i32 {limit}, {size}")
    fast, slow, done = b.labels("fast", "slow", "done")
    b.emit(f"br i1 {all_hold}, label %{fast}, label %{slow}")
    b.place(fast)
    with b.region(), f.scope(proven):
        everywhere()
        b.branch(done)
    b.place(slow)
    with b.region(), f.scope(), b.seldom():
        if size > step:
            masked()
        else:
            run(integer(start))
        b.branch(done)
    b.place(done)


def nest(
    f: Frame,
    shape: tuple[int, ...],
    axis: int,
    terms: Sequence[Term],
    body: Callable[[tuple[Val, ...], int], None],
    dead: Sequence[Term] = (),
) -> None:
    """Loops over all axes, the lanes along `axis` innermost. Where a `dead` term fails the body need not run."""
    index: list[Val | None] = [None] * len(shape)
    lanes = width(f, shape[axis])

    def inner() -> None:
        last = [t for t in dead if growth(f, t, axis) is not None]
        stop = prefix(f, last, [index], axis, shape[axis]) if last and shape[axis] > lanes else ""
        sweep(f, terms, index, axis, shape[axis], lambda at: body(tuple(at[0]), lanes if lanes > 1 else 0), stop=stop)

    def outer(axes: list[int]) -> None:
        if not axes:
            inner()
            return
        with f.loop("0", str(shape[axes[0]]), 1) as at:
            index[axes[0]] = at
            outer(axes[1:])
            index[axes[0]] = None

    outer([d for d in range(len(shape)) if d != axis])


def scattered(f: Frame, value: Value, place: Place, axis: int) -> bool:
    """Whether reading this tile along the axis jumps through memory."""
    if axis not in place:
        return False
    dim = place.index(axis)
    if value in f.buffers:
        return dim != f.buffers[value].axis  # whatever the sizes: a sum's order must not depend on them
    op = value.op
    if op is None or op.name != "tt.load":
        return False
    pointer = op.operands[0]
    return pointer_scattered(f, pointer, dim)


def pointer_scattered(f: Frame, pointer: Value, dim: int) -> bool:
    return f.strides.of(pointer)[dim] not in (0, BYTES[pointer.type.pointee])


def pick_axis(
    f: Frame, shape: tuple[int, ...], roots: Sequence[tuple[Value, Place]], pointer: Value | None = None
) -> int:
    """The axis for the lanes: long, and along which memory is read and written in order."""
    tiles = list(pulled(f, roots))

    def price(axis: int) -> float:
        jumps = sum(scattered(f, value, place, axis) for value, place in tiles)
        jumps += pointer is not None and pointer_scattered(f, pointer, axis)
        return (1 + 4 * jumps) * max(1.0, f.target.lanes / shape[axis])

    return min(sorted(range(len(shape)), reverse=True), key=price)


def reduction_axis(f: Frame, shape: tuple[int, ...], roots: Sequence[tuple[Value, Place]], axis: int) -> int:
    """The axis for the lanes of a reduction: its own if memory lies along it, else another one.

    The answer looks at the reduced axis alone, so that the order of a sum does not depend on the size of others.
    """
    if len(shape) == 1 or not any(scattered(f, value, place, axis) for value, place in pulled(f, roots)):
        return axis
    return max(d for d in range(len(shape)) if d != axis)
