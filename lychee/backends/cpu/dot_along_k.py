"""Products whose operands both lie in memory along K: every output is a vector of partial sums over K."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from . import elementwise
from .demand import source
from .dot_blocks import (
    LEFT,
    RIGHT,
    K,
    Lines,
    M,
    N,
    Product,
    each_block,
    lines_at,
    live_part,
    moved,
    multiply_add,
    runs_over,
    store_block,
)
from .frame import Frame
from .llvm import BYTES, Val, floating, integer, literal, register
from .memory import read_buffer, write_buffer
from .nests import ROUND, Term, growth, has_mask, lane_index, mask_terms, prefix, pulled, sweep, width
from .sum_lanes import sum_lanes
from .ttir import Op, Type, Value

ZERO = ("0", floating(0.0, "f32").ref)  # not -0.0, which a sum never is
LINE = 64  # bytes that memory gives at once
AHEAD = 16  # bytes of a column from what is read to what is asked for: 4 rows of fp32, 16 of int8
SHORT = 256  # K up to which summing lanes takes a good part of the time


def _block_sizes(f: Frame, p: Product) -> tuple[int, int]:
    """Rows and columns of outputs whose accumulators fit the register file together with the operands.

    The long side streams; each of its elements is read, and perhaps computed, once for every block of the other. So as
    much of the other side as fits is met at once where that number is known or pays, in blocks of one size.
    """
    rows, columns, _ = p.sizes
    wide = f.target.lanes >= 16
    known = literal(live_part(f, p, N if rows >= columns else M))
    most = 8 if wide and (known is not None or _is_computed(f, p)) else 4
    count = known or min(rows, columns)
    short = -(-count // -(-count // most))
    place = LEFT if rows >= columns else RIGHT
    tiles = {v for v, _ in pulled(f, [(v, place) for v in p.streamed])}
    read = max(1, sum(v.op is not None and v.op.name == "tt.load" for v in tiles))  # registers for each of its rows
    room = (22 if wide else 16) // (short + read)
    long = next(n for n in (4, 2, 1) if n <= max(1, min(room, max(rows, columns))))
    return (long, short) if rows >= columns else (short, long)


def _is_computed(f: Frame, p: Product) -> bool:
    """Whether the elements of the side that streams are not only read."""
    return any(v not in f.buffers and v.op is not None and v.op.name != "tt.load" for v in p.streamed)


def blocks_along_k(f: Frame, p: Product) -> None:
    _, columns, depth = p.sizes
    if p.over is nullcontext and depth <= SHORT and columns > 1 and f.target.lanes > 1:
        _lanes_summed_later(f, p)
        return

    def block(rows: Lines, columns: Lines) -> None:
        _with_start(f, p, _partial_sums(f, p, rows.reads, columns.reads), rows.writes, columns.writes)

    # Elements that are computed for every block of the other side anyway need not be computed while they are near.
    each_block(f, p, _block_sizes(f, p), block, swap=_is_computed(f, p))


def _lanes_summed_later(f: Frame, p: Product) -> None:
    """The lanes of a whole row of blocks are summed after its products, so that nothing waits for either."""
    height, length = _block_sizes(f, p)
    lanes, group = width(f, p.sizes[K]), width(f, p.sizes[N])
    held = f.buffer(Type((height, p.sizes[N], lanes), p.elem))
    n = lanes if lanes > 1 else 0
    begin = lane_index(integer(0), lanes)
    with runs_over(f, p, M, p.sizes[M], height) as row_runs, runs_over(f, p, N, p.sizes[N], length) as column_runs:
        for (low, high, by), last in row_runs:
            with f.loop(low, high, by) as i:
                rows = lines_at(f, i, by, last)
                for (column_low, column_high, column_by), column_last in column_runs:
                    with f.loop(column_low, column_high, column_by) as j:
                        columns = lines_at(f, j, column_by, column_last)
                        sums = _partial_sums(f, p, rows.reads, columns.reads)
                        for number, line in enumerate(sums):
                            for column, value in zip(columns.writes, line, strict=True):
                                write_buffer(f, held, (integer(number), column, begin), value, n)
                with f.loop("0", str(p.sizes[N]), group) as j:
                    places = [moved(f, j, t) for t in range(group)]
                    for number, row in enumerate(rows.writes):
                        vectors = [read_buffer(f, held, (integer(number), c, begin), n) for c in places]
                        _with_start(f, p, [vectors], [row], places)


def _partial_sums(f: Frame, p: Product, ms: Sequence[Val], cs: Sequence[Val]) -> list[list[Val]]:
    """A vector of sums over K for each pair of a row and a column; the block's accumulators are in registers."""
    depth = p.sizes[K]
    lanes = width(f, depth)
    n = lanes if lanes > 1 else 0
    ends = _ends_of_k(f, p)
    sums = [[f.b.slot(p.elem, n) for _ in cs] for _ in ms]
    for slot in (s for row in sums for s in row):
        f.b.put(f.b.as_vector(Val(p.elem, "0" if p.elem == "i32" else "0.0"), n), slot)

    def step(places: list[list[Val]]) -> None:
        k = places[0][K]
        _prefetch(f, p, ms, cs, k, n)
        for left, right in p.factors:
            line = [f.at(right, (k, j), n) for j in cs]
            for row, i in zip(sums, ms, strict=True):
                first = f.at(left, (i, k), n)
                for slot, second in zip(row, line, strict=True):
                    multiply_add(f, p.elem, n, first, second, slot)

    with p.over(), f.scope():
        corners: list[list[Val | None]] = [[i, cs[0], None] for i in ms] + [[ms[0], j, None] for j in cs]
        if any({M, N} <= t.axes for t in p.terms):
            corners = [[i, j, None] for i in ms for j in cs]
        terms = [t for t in p.terms if t.op not in f.proven]
        stop = prefix(f, ends, corners[:1], K, depth) if ends and depth > lanes else ""
        sweep(f, terms, [ms[0], cs[0], None], K, depth, step, rows=corners, stop=stop, whole=True)
    return [[f.b.get(s, p.elem, n) for s in row] for row in sums]


def _prefetch(f: Frame, p: Product, ms: Sequence[Val], cs: Sequence[Val], k: Val, lanes: int) -> None:
    """Ask for what later blocks read of the side that streams, each line once; the other side stays in the cache."""
    by_rows = p.sizes[M] >= p.sizes[N]
    rows = ms if by_rows else cs
    for load in _streams(f, p):
        size = BYTES[load.results[0].type.elem]
        ahead = max(len(rows), AHEAD // size)
        if k.align % min(LINE // size, p.sizes[K], ROUND * max(1, lanes)):
            continue
        for row in rows:
            place = moved(f, row, ahead)
            pointer = f.at(load.operands[0], (place, k) if by_rows else (k, place), lanes)
            if not pointer.lanes:  # an address past the end does no harm: prefetching never faults
                f.b.call("void", "llvm.prefetch.p0", ("ptr", pointer.ref), *(("i32", c) for c in ("0", "3", "1")))


def _streams(f: Frame, p: Product) -> list[Op]:
    """The loads that the longer side is computed from, element by element, at addresses that only arithmetic makes."""
    found: list[Op] = []
    stack = p.streamed
    while stack:
        value = stack.pop()
        op = value.op
        if op is None or value in f.buffers:
            continue
        if op.name == "tt.load":
            if _is_arithmetic(f, op.operands[0]) and op not in found:
                found.append(op)
        elif elementwise.supports(op.name) and not op.regions:
            stack += [o for o in op.operands if o.type.is_tile]
    return found


def _is_arithmetic(f: Frame, pointer: Value) -> bool:
    """Whether an address past the tile's end can be told without reading memory past another tile's."""
    tiles = list(pulled(f, [(pointer, (0,) * len(pointer.type.shape))]))
    return not any(v in f.buffers or (v.op is not None and v.op.name == "tt.load") for v, _ in tiles)


def _ends_of_k(f: Frame, p: Product) -> list[Term]:
    """Comparisons along K alone whose failure makes both operands 0: beyond them there is nothing to add."""
    if len(p.factors) > 1:
        return []
    found: list[list[Term]] = []
    for value, place in zip(p.factors[0], (LEFT, RIGHT), strict=True):
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


def _with_start(f: Frame, p: Product, held: list[list[Val]], ms: Sequence[Val], cs: Sequence[Val]) -> None:
    """Sum the lanes of each output, add where the sums start, store."""
    by_row = len(ms) == 1 or (len(cs) > 1 and not p.result.turned)
    lines = held if by_row else [[row[j] for row in held] for j in range(len(cs))]
    count = len(lines[0])
    lanes = count if count > 1 else 0
    along = lane_index(cs[0] if by_row else ms[0], count)
    kind, add = register(p.elem, lanes), "add" if p.elem == "i32" else "fadd"
    totals = sum_lanes(f.b, p.elem, [v for line in lines for v in line])
    for number in range(len(lines)):
        index = (ms[number], along) if by_row else (along, cs[number])
        total = f.b.lanes(totals, number * count, count)
        base = f.at(p.start, index, lanes)
        if base.ref not in ZERO:
            total = Val(p.elem, f.b.op(f"{add} {kind} {total.ref}, {f.b.vector(base, lanes)}"), lanes)
        store_block(f, p, index, total)
