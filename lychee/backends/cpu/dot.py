"""Matrix products, register-blocked, with the loop over K inside the blocks.

Where both operands lie in memory along K, lanes run along K: every output is a vector of partial sums, lane i summing
the products i, i + lanes, i + 2 lanes, ... in order, and a fixed tree over the lanes at the end. Otherwise lanes run
along N and every output sums its products in order. Which of the two, and so the order, depends on the access
patterns, the dtype and BLOCK_K alone: never on BLOCK_M or BLOCK_N, masks, or how blocks are formed.

A loop that only accumulates dots is turned inside out: each block of outputs runs over all of K, accumulators in
registers, so that weights stream through once, row after row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from . import elementwise
from .demand import live_terms, stored_by_columns
from .dot_along_k import blocks_along_k
from .dot_blocks import LEFT, RIGHT, K, M, N, Over, Product, blocks_along_n
from .errors import UnsupportedError
from .frame import Frame
from .nests import mask_terms, pulled, scattered
from .order import induction_step
from .ttir import Block, Op, Value


def dot(f: Frame, op: Op) -> None:
    """One product; its third operand is where the sums start."""
    _multiply(f, [op], op.operands[2], op.results[0], nullcontext)


def _multiply(f: Frame, dots: Sequence[Op], start: Value, result: Value, over: Over) -> None:
    """Sums from `start` into a buffer for `result`; each of the dots adds to what the one before gave."""
    if len(result.type.shape) != 2:
        raise UnsupportedError.of(dots[0], "only products of two-dimensional tiles are; loop over the batch")
    factors = tuple((op.operands[0], op.operands[1]) for op in dots)
    rows, depth = factors[0][0].type.shape
    columns = factors[0][1].type.shape[1]
    elem = result.type.elem if result.type.elem in ("f64", "i32") else "f32"
    sides = [(value, place) for pair in factors for value, place in zip(pair, (LEFT, RIGHT), strict=True)]
    along_k = not any(scattered(f, v, p, K) for v, p in pulled(f, sides))
    terms = mask_terms(f, sides, [], others=[(start, (M, N))])
    live = live_terms(f, terms, result)
    buffer = f.targets.get(result) or f.buffer(result.type, turned=along_k and stored_by_columns(f, result))
    made = Product(factors, start, buffer, (rows, columns, depth), elem, tuple(terms), live, over)
    with f.scope(), _readable_anywhere(f, start) if live else nullcontext():
        (blocks_along_k if along_k else blocks_along_n)(f, made)
    f.buffers[result] = buffer


@contextmanager
def _readable_anywhere(f: Frame, start: Value) -> Iterator[None]:
    """The tile in a buffer, if reading it reads memory: a product asks for it beyond what its masks allow."""
    from .control import fill

    if not any(
        v.op is not None and v.op.name == "tt.load" and v not in f.buffers for v, _ in pulled(f, [(start, (M, N))])
    ):
        yield
        return
    buffer = f.buffer(start.type)
    fill(f, [(start, buffer)])
    f.buffers[start] = buffer
    yield
    del f.buffers[start]


def grows_in_place(f: Frame, argument: Value, yielded: Value) -> bool:
    """Whether a loop may keep a carried sum where it is: a product adds to it, and nothing else looks at either."""
    op = yielded.op
    if op is None or op.name != "tt.dot" or len(f.uses[yielded]) != 1 or len(yielded.type.shape) != 2:
        return False
    stack = [argument]
    while stack:
        value = stack.pop()
        for user in f.uses.get(value, []):
            if user is op:
                if value in op.operands[:2]:
                    return False
            elif not elementwise.supports(user.name) or user.regions or user.results[0] in f.forced:
                return False
            else:
                stack.append(user.results[0])
    return True


def is_contraction(f: Frame, op: Op) -> bool:
    """A loop whose tiles are sums of dots and inductions, and which computes nothing else that needs an order."""
    body = op.regions[0][0]
    summed: list[Op] = []
    for argument, _, yielded, result in _carried(op):
        if not argument.type.is_tile or induction_step(argument, yielded) is not None:
            if f.uses.get(result):
                return False  # the loop will run many times, or not at all
            continue
        dots = _chain(f, body, argument, yielded)
        if not dots or len(argument.type.shape) != 2 or len(f.uses[argument]) != 1:
            return False
        if any(o.operands[0].type.shape != dots[0].operands[0].type.shape for o in dots):
            return False
        summed += dots
    inner = [o for o in body.ops[:-1] if o.name != "tt.dot"]
    if not summed or len(summed) != len(body.ops) - 1 - len(inner):
        return False
    held = {
        "tt.store",
        "tt.reduce",
        "tt.scan",
        "tt.join",
        "tt.histogram",
        "tt.unsplat",
        "tt.atomic_rmw",
        "tt.atomic_cas",
    }
    return not any(o.regions or o.name in held or any(r in f.forced for r in o.results) for o in inner)


def _chain(f: Frame, body: Block, argument: Value, yielded: Value) -> list[Op]:
    """The dots of a loop's body that add to a carried sum, one to what the other gave; nothing if others see it."""
    found: list[Op] = []
    value = yielded
    while value is not argument:
        op = value.op
        if op is None or op.name != "tt.dot" or op not in body.ops or len(f.uses[value]) != 1:
            return []
        found.insert(0, op)
        value = op.operands[2]
    return found


def contraction(f: Frame, op: Op) -> None:
    """The loop turned inside out, once for each of its sums."""
    from .control import counted, scalar

    body = op.regions[0][0]
    sums = [(a, i, r, dots) for a, i, y, r in _carried(op) if (dots := _chain(f, body, a, y))]
    rest = [a for a, *_ in _carried(op) if a not in [s[0] for s in sums]]

    @contextmanager
    def over() -> Iterator[None]:
        with counted(f, op, rest):
            for inner in body.ops[:-1]:
                for result in inner.results:
                    if not result.type.is_tile:
                        f.env[result] = scalar(f, inner)
            yield

    for _, initial, result, dots in sums:
        _multiply(f, dots, initial, result, over)


def _carried(op: Op) -> list[tuple[Value, Value, Value, Value]]:
    body = op.regions[0][0]
    return list(zip(body.args[1:], op.operands[3:], body.ops[-1].operands, op.results, strict=True))
