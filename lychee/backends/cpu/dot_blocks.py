"""Blocks of a product's outputs: accumulators in registers, the loop over K inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

from .casts import round_to
from .frame import Buffer, Frame
from .llvm import Val, literal, register, suffix
from .memory import write_buffer
from .nests import Term, growth, lane_index, prefix, sweep, width
from .shapes import Place
from .ttir import Value

M, N, K = 0, 1, 2  # the axes of a product's loop nest
LEFT: Place = (M, K)
RIGHT: Place = (K, N)
Over = Callable[[], AbstractContextManager[object]]
Run = tuple[str, str, int]  # of a loop: low, high, step


@dataclass(frozen=True)
class Lines:
    """The rows, or columns, of one block: where operands are read, and where results go.

    Where an axis ends inside the block, operands are read at its last live place again, and what comes of it goes where
    nobody looks.
    """

    reads: list[Val]
    writes: list[Val]


Body = Callable[[Lines, Lines], None]


@dataclass(frozen=True)
class Product:
    """left [M, K] times right [K, N], for each pair of factors, summed from `start` into `result`.

    Products of several pairs are added in turn, a vector of K of each.
    """

    factors: tuple[tuple[Value, Value], ...]
    start: Value
    result: Buffer
    sizes: tuple[int, int, int]
    elem: str  # of the accumulators
    terms: tuple[Term, ...]  # comparisons in the operands' masks
    live: dict[int, list[Term]]  # for an axis: those that tell which of its rows anyone looks at
    over: Over  # the loop around K, entered once per block of outputs

    @property
    def streamed(self) -> list[Value]:
        """The longer side: read once, while the other stays in the cache."""
        return [left if self.sizes[M] >= self.sizes[N] else right for left, right in self.factors]


def moved(f: Frame, at: Val, by: int) -> Val:
    if at.literal is not None or by == 0:
        return Val("i32", f.b.add(at.ref, str(by), "i32"))
    return Val("i32", f.b.op(f"add nsw i32 {at.ref}, {by}"))  # so that LLVM sees one address behind the other


def multiply_add(f: Frame, elem: str, lanes: int, x: Val, y: Val, sum_slot: str) -> None:
    b, kind = f.b, register(elem, lanes)
    held = b.get(sum_slot, elem, lanes)
    left, right = (_operand(f, v, elem, lanes) for v in (x, y))
    if elem == "i32":
        ref = b.op(f"add {kind} {held.ref}, {b.op(f'mul {kind} {left}, {right}')}")
    else:
        ref = b.call(kind, f"llvm.fma.{suffix(elem, lanes)}", (kind, left), (kind, right), (kind, held.ref))
    b.put(Val(elem, ref, lanes), sum_slot)


def _operand(f: Frame, value: Val, elem: str, lanes: int) -> str:
    """A factor in the accumulators' type."""
    vector = f.b.as_vector(value, lanes)
    if elem == "i32" and value.elem != "i32":
        return f.b.op(f"sext {register(value.elem, lanes)} {vector.ref} to {register('i32', lanes)}")
    return vector.ref


def live_part(f: Frame, p: Product, axis: int) -> str:
    """How many places of the axis, from the first, anyone looks at."""
    if axis not in p.live:
        return str(p.sizes[axis])
    return prefix(f, p.live[axis], [[None, None, None]], axis, p.sizes[axis])


@contextmanager
def runs_over(f: Frame, p: Product, axis: int, count: int, block: int) -> Iterator[list[tuple[Run, str]]]:
    """Loops that cover the axis, or its live part, by blocks, each with the last place to read from ("" for any).

    Of the side that does not stream, and of a long product, blocks that are whole have a loop of their own: their rows
    lie at one distance from each other, where rows that may be the last one again each need a register for an address.
    """
    if axis not in p.live:
        whole = count - count % block
        yield [((str(lo), str(hi), by), "") for lo, hi, by in ((0, whole, block), (whole, count, 1)) if lo < hi]
        return
    live = live_part(f, p, axis)
    known, last = literal(live), f.b.sub(live, "1", "i32")
    runs = [(("0", live, block), "" if known is not None and known % block == 0 else last)]
    if known is None and p.over is not nullcontext and p.sizes[axis] <= p.sizes[N if axis == M else M]:
        full = f.b.op(f"and i32 {live}, {-block}")
        runs = [(("0", full, block), ""), ((full, live, block), last)]
    with f.scope(frozenset(t.op for t in p.live[axis])):
        yield runs


def lines_at(f: Frame, first: Val, block: int, last: str) -> Lines:
    writes = [moved(f, first, s) for s in range(block)]
    if not last:
        return Lines(writes, writes)
    reads = [Val("i32", f.b.least(w.ref, last)) for w in writes[1:]]
    return Lines([first, *reads], writes)


def each_block(f: Frame, p: Product, sizes: tuple[int, int], body: Body, unit: int = 1, swap: bool = False) -> None:
    """Call `body` for all blocks of rows and columns; the longer side is the outer loop, so that it streams.

    `swap`: it is the inner one, so that a block of the other stays in the nearest cache. Columns count in units of
    `unit` lanes.
    """
    columns = p.sizes[N] // unit
    outer, inner = (M, N) if (p.sizes[M] >= columns) != swap else (N, M)
    with runs_over(f, p, M, p.sizes[M], sizes[M]) as rows, runs_over(f, p, N, columns, sizes[N]) as cols:
        runs = {M: rows, N: cols}
        for (low, high, by), last in runs[outer]:
            with f.loop(low, high, by) as i:
                for (inner_low, inner_high, inner_by), inner_last in runs[inner]:
                    with f.loop(inner_low, inner_high, inner_by) as j:
                        at = {outer: lines_at(f, i, by, last), inner: lines_at(f, j, inner_by, inner_last)}
                        body(at[M], at[N])


def store_block(f: Frame, p: Product, index: tuple[Val, Val], value: Val) -> None:
    rounded = value if p.elem == "i32" else round_to(f.b, value, p.result.elem)
    write_buffer(f, p.result, index, rounded, value.lanes)


def blocks_along_n(f: Frame, p: Product) -> None:
    """Lanes are columns; every output sums its products one after the other."""
    p = replace(p, live={axis: terms for axis, terms in p.live.items() if axis == M})  # vectors of columns are whole
    height, columns, depth = p.sizes
    lanes = width(f, columns)
    n = lanes if lanes > 1 else 0
    size_m = min(height, 4)
    vectors = min(columns // lanes, 4 if f.target.lanes >= 16 or size_m < 4 else 2)

    def block(rows: Lines, units: Lines) -> None:
        ms = rows.reads
        bases = [Val("i32", f.b.mul(u.ref, str(lanes), "i32"), align=lanes) for u in units.reads]
        cs = [lane_index(base, lanes) for base in bases]
        sums = [[f.b.slot(p.elem, n) for _ in cs] for _ in ms]
        for row, i in zip(sums, rows.writes, strict=True):
            for slot, j in zip(row, cs, strict=True):
                f.b.put(Val(p.elem, f.b.vector(f.at(p.start, (i, j), n), n), n), slot)

        def step(places: list[list[Val]]) -> None:
            k = places[0][K]
            for left, right in p.factors:
                line = [f.at(right, (k, j), n) for j in cs]
                for row, i in zip(sums, ms, strict=True):
                    first = f.at(left, (i, k), 0)
                    for slot, second in zip(row, line, strict=True):
                        multiply_add(f, p.elem, n, first, second, slot)

        with p.over(), f.scope():
            last = moved(f, bases[-1], lanes - 1)
            corners: list[list[Val | None]] = [[i, last, None] for i in ms]
            terms = [t for t in p.terms if t.op not in f.proven and growth(f, t, N) is not None]
            sweep(f, terms, [ms[0], last, None], K, depth, step, lanes=1, rows=corners, whole=True)
        for row, i in zip(sums, rows.writes, strict=True):
            for slot, j in zip(row, cs, strict=True):
                store_block(f, p, (i, j), f.b.get(slot, p.elem, n))

    each_block(f, p, (size_m, vectors), block, unit=lanes)
