"""Blocks of a product's outputs: accumulators in registers, the loop over K inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from .casts import round_to
from .demand import source
from .frame import Buffer, Frame
from .llvm import Val, register, suffix
from .memory import write_buffer
from .nests import Term, growth, has_mask, lane_index, mask_terms, prefix, pulled, sweep, width
from .shapes import Place
from .sum_lanes import sum_lanes
from .ttir import Op, Value

M, N, K = 0, 1, 2  # the axes of a product's loop nest
LEFT: Place = (M, K)
RIGHT: Place = (K, N)
Over = Callable[[], AbstractContextManager[object]]
Body = Callable[[list[Val], list[Val]], None]


@dataclass(frozen=True)
class Product:
    """left [M, K] times right [K, N], summed from `start` into `result`."""

    left: Value
    right: Value
    start: Value
    result: Buffer
    sizes: tuple[int, int, int]
    elem: str  # of the accumulators
    terms: tuple[Term, ...]  # comparisons in the operands' masks
    live: dict[int, list[Term]]  # for an axis: those that tell which of its rows anyone looks at
    over: Over  # the loop around K, entered once per block of outputs


def _step(f: Frame, at: Val, by: int) -> Val:
    return Val("i32", f.b.add(at.ref, str(by), "i32"))


def _multiply_add(f: Frame, elem: str, lanes: int, x: Val, y: Val, sum_slot: str) -> None:
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


def _block_sizes(f: Frame, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of outputs whose accumulators fit the register file together with the operands."""
    wide = f.target.lanes >= 16
    short = min(rows, columns, 4)
    long = min(max(rows, columns), 4 if wide or short < 4 else 2)
    return (long, short) if rows >= columns else (short, long)


@contextmanager
def _runs(f: Frame, p: Product, axis: int, block: int) -> Iterator[list[tuple[str, str, int]]]:
    """Loops (low, high, step) that cover the axis, or its live part, by whole blocks and then one by one."""
    size = p.sizes[axis]
    if axis not in p.live:
        whole = size - size % block
        yield [(str(lo), str(hi), by) for lo, hi, by in ((0, whole, block), (whole, size, 1)) if lo < hi]
        return
    live = prefix(f, p.live[axis], [[None, None, None]], axis, size)
    with f.scope(frozenset(t.op for t in p.live[axis])):
        if block == 1:
            yield [("0", live, 1)]
        else:
            whole_ref = f.b.sub(live, f.b.op(f"urem i32 {live}, {block}"), "i32")
            yield [("0", whole_ref, block), (whole_ref, live, 1)]


def _each_block(f: Frame, p: Product, sizes: tuple[int, int], body: Body, unit: int = 1) -> None:
    """Call `body` for all blocks of rows and columns; the longer side is the outer loop, so that it streams.

    Columns count in units of `unit` lanes.
    """
    columns = p.sizes[N] // unit
    outer, inner = (M, N) if p.sizes[M] >= columns else (N, M)
    with _runs(f, p, M, sizes[M]) as m_runs, _column_runs(f, p, sizes[N], unit) as n_runs:
        runs = {M: m_runs, N: n_runs}
        for low, high, by in runs[outer]:
            with f.loop(low, high, by) as i:
                for inner_low, inner_high, inner_by in runs[inner]:
                    with f.loop(inner_low, inner_high, inner_by) as j:
                        at = {outer: (i, by), inner: (j, inner_by)}
                        rows, cols = ([_step(f, v, s) for s in range(n)] for v, n in (at[M], at[N]))
                        body(rows, cols)


@contextmanager
def _column_runs(f: Frame, p: Product, block: int, unit: int) -> Iterator[list[tuple[str, str, int]]]:
    if unit == 1:
        with _runs(f, p, N, block) as runs:
            yield runs
        return
    count = p.sizes[N] // unit
    whole = count - count % block
    yield [(str(lo), str(hi), by) for lo, hi, by in ((0, whole, block), (whole, count, 1)) if lo < hi]


def blocks_along_k(f: Frame, p: Product) -> None:
    """Every output is a vector of partial sums over K."""
    depth = p.sizes[K]
    lanes = width(f, depth)
    n = lanes if lanes > 1 else 0
    ends = _ends_of_k(f, p)

    def block(ms: list[Val], cs: list[Val]) -> None:
        sums = [[f.b.slot(p.elem, n) for _ in cs] for _ in ms]
        for slot in (s for row in sums for s in row):
            f.b.put(f.b.as_vector(Val(p.elem, "0" if p.elem == "i32" else "0.0"), n), slot)

        def step(places: list[list[Val]]) -> None:
            k = places[0][K]
            _prefetch(f, p, ms, cs, k, n)
            right = [f.at(p.right, (k, j), n) for j in cs]
            for row, i in zip(sums, ms, strict=True):
                left = f.at(p.left, (i, k), n)
                for slot, factor in zip(row, right, strict=True):
                    _multiply_add(f, p.elem, n, left, factor, slot)

        with p.over(), f.scope():
            corners: list[list[Val | None]] = [[i, cs[0], None] for i in ms] + [[ms[0], j, None] for j in cs]
            if any({M, N} <= t.axes for t in p.terms):
                corners = [[i, j, None] for i in ms for j in cs]
            terms = [t for t in p.terms if t.op not in f.proven]
            stop = prefix(f, ends, corners[:1], K, depth) if ends and depth > lanes else ""
            sweep(f, terms, [ms[0], cs[0], None], K, depth, step, rows=corners, stop=stop, whole=True)
        held = [[f.b.get(s, p.elem, n) for s in row] for row in sums]
        _finish_along_k(f, p, held, ms, cs)

    _each_block(f, p, _block_sizes(f, p.sizes[M], p.sizes[N]), block)


def _prefetch(f: Frame, p: Product, ms: list[Val], cs: list[Val], k: Val, lanes: int) -> None:
    """Ask for what the next block reads from the side that streams; the other side stays in the cache."""
    by_rows = p.sizes[M] >= p.sizes[N]
    load, rows = _stream(f, p.left if by_rows else p.right), ms if by_rows else cs
    if load is None or not _is_arithmetic(f, load.operands[0]):
        return
    for row in rows:
        ahead = _step(f, row, len(rows))
        pointer = f.at(load.operands[0], (ahead, k) if by_rows else (k, ahead), lanes)
        if not pointer.lanes:  # an address past the end does no harm: prefetching never faults
            f.b.call("void", "llvm.prefetch.p0", ("ptr", pointer.ref), *(("i32", c) for c in ("0", "3", "1")))


def _is_arithmetic(f: Frame, pointer: Value) -> bool:
    """Whether an address past the tile's end can be told without reading memory past another tile's."""
    tiles = list(pulled(f, [(pointer, (0,) * len(pointer.type.shape))]))
    return not any(v in f.buffers or (v.op is not None and v.op.name == "tt.load") for v, _ in tiles)


def _stream(f: Frame, value: Value) -> Op | None:
    """The load that a factor is, but for a cast."""
    op = value.op
    while op is not None and value not in f.buffers and op.name in ("arith.extf", "arith.truncf", "arith.sitofp"):
        value = op.operands[0]
        op = value.op
    return op if op is not None and op.name == "tt.load" and value not in f.buffers else None


def _ends_of_k(f: Frame, p: Product) -> list[Term]:
    """Comparisons along K alone whose failure makes both operands 0: beyond them there is nothing to add."""
    found: list[list[Term]] = []
    for value, place in ((p.left, LEFT), (p.right, RIGHT)):
        op = value.op
        while (
            op is not None
            and value not in f.buffers
            and op.name in ("arith.extf", "arith.truncf", "arith.sitofp", "tt.trans")
        ):
            if op.name == "tt.trans":
                place = place[::-1]
            value = op.operands[0]
            op = value.op
        if op is None or op.name != "tt.load" or value in f.buffers or not has_mask(op) or not _is_zero(op):
            return []
        found.append([t for t in mask_terms(f, [], [(op.operands[1], place)]) if t.axes == {K} and growth(f, t, K)])
    # Both sides must end at the same place, or a number on one side would meet an unread one on the other.
    both = {source(t.op.results[0]) for t in found[0]} & {source(t.op.results[0]) for t in found[1]}
    return [t for t in found[0] if source(t.op.results[0]) in both]


def _is_zero(op: Op) -> bool:
    if len(op.operands) < 3:
        return False
    other = op.operands[2].op
    while other is not None and other.name in ("tt.splat", "tt.broadcast", "tt.expand_dims"):
        other = other.operands[0].op
    return other is not None and other.name == "arith.constant" and other.attrs["value"] == 0


def _finish_along_k(f: Frame, p: Product, held: list[list[Val]], ms: Sequence[Val], cs: Sequence[Val]) -> None:
    """Sum the lanes of each output, add where the sums start, store."""
    by_row = len(cs) > 1 or len(ms) == 1
    lines = held if by_row else [[row[j] for row in held] for j in range(len(cs))]
    for number, line in enumerate(lines):
        count = len(line)
        lanes = count if count > 1 else 0
        along = lane_index(cs[0] if by_row else ms[0], count)
        index = (ms[number], along) if by_row else (along, cs[number])
        total = sum_lanes(f.b, p.elem, line)
        kind = register(p.elem, lanes)
        base = f.b.vector(f.at(p.start, index, lanes), lanes)
        add = "add" if p.elem == "i32" else "fadd"
        _store(f, p, index, Val(p.elem, f.b.op(f"{add} {kind} {total.ref}, {base}"), lanes))


def _store(f: Frame, p: Product, index: tuple[Val, Val], value: Val) -> None:
    rounded = value if p.elem == "i32" else round_to(f.b, value, p.result.elem)
    write_buffer(f, p.result, index, rounded, value.lanes)


def blocks_along_n(f: Frame, p: Product) -> None:
    """Lanes are columns; every output sums its products one after the other."""
    rows, columns, depth = p.sizes
    lanes = width(f, columns)
    n = lanes if lanes > 1 else 0
    size_m = min(rows, 4)
    vectors = min(columns // lanes, 4 if f.target.lanes >= 16 or size_m < 4 else 2)

    def block(ms: list[Val], units: list[Val]) -> None:
        bases = [Val("i32", f.b.mul(u.ref, str(lanes), "i32"), align=lanes) for u in units]
        cs = [lane_index(base, lanes) for base in bases]
        sums = [[f.b.slot(p.elem, n) for _ in cs] for _ in ms]
        for row, i in zip(sums, ms, strict=True):
            for slot, j in zip(row, cs, strict=True):
                f.b.put(Val(p.elem, f.b.vector(f.at(p.start, (i, j), n), n), n), slot)

        def step(places: list[list[Val]]) -> None:
            k = places[0][K]
            right = [f.at(p.right, (k, j), n) for j in cs]
            for row, i in zip(sums, ms, strict=True):
                left = f.at(p.left, (i, k), 0)
                for slot, factor in zip(row, right, strict=True):
                    _multiply_add(f, p.elem, n, left, factor, slot)

        with p.over(), f.scope():
            last = _step(f, bases[-1], lanes - 1)
            corners: list[list[Val | None]] = [[i, last, None] for i in ms]
            terms = [t for t in p.terms if t.op not in f.proven and growth(f, t, N) is not None]
            sweep(f, terms, [ms[0], last, None], K, depth, step, lanes=1, rows=corners, whole=True)
        for row, i in zip(sums, ms, strict=True):
            for slot, j in zip(row, cs, strict=True):
                _store(f, p, (i, j), f.b.get(slot, p.elem, n))

    _each_block(f, p, (size_m, vectors), block, unit=lanes)
