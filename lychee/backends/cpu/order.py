"""What must be held in a buffer, and why: memory order first, then cost.

Everything else is evaluated where it is used. A load may be evaluated later than it stands only if no store or atomic
comes between, since any two pointers may alias; a store may read what it overwrites only element for element.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .elementwise import DIVISION, VECMATH
from .lanes import GENERAL, Strides
from .shapes import Place, keeps_runs, operand_places
from .ttir import Block, Func, Op, Value, walk

WRITES = {"tt.store", "tt.atomic_rmw", "tt.atomic_cas"}
LOOPS = {"scf.for", "scf.while"}
ROOTS = {"tt.reduce", "tt.scan", "tt.dot", "tt.histogram", "tt.unsplat", "tt.print", *WRITES}
TERMINATORS = {"scf.yield", "scf.condition", "cf.br", "cf.cond_br"}
OWN_COST = {
    **dict.fromkeys(DIVISION, 8),
    **dict.fromkeys(VECMATH, 12),
    **dict.fromkeys(("arith.divf", "tt.precise_divf", "math.sqrt", "tt.precise_sqrt"), 6),
    **dict.fromkeys(("tt.splat", "tt.make_range", "arith.constant", "tt.expand_dims", "tt.broadcast", "tt.trans"), 0),
    "arith.remf": 20,
}
FREE = {
    "arith.addi",
    "arith.subi",
    "arith.muli",
    "arith.extsi",
    "tt.addptr",
    "arith.cmpi",
    "arith.andi",
}  # addresses, masks
SHARED = 8  # cost from which a value that several nests use is computed once
REPEATED = 6  # cost from which a value that a loop or a broadcast repeats is computed once
OPERAND = 12  # cost up to which the operand of a dot is evaluated again for every block; below that of an exp
MOVED = 3  # cost from which a value read at rearranged indices is computed first


@dataclass
class Plan:
    """Values that get a buffer where they are defined, each with its reason."""

    forced: dict[Value, str] = field(default_factory=dict)
    strides: Strides = field(default_factory=Strides)

    def __str__(self) -> str:
        return "\n".join(
            f"{value.name}: {reason}" for value, reason in sorted(self.forced.items(), key=lambda x: x[0].name)
        )


def induction_step(argument: Value, yielded: Value) -> Value | None:
    """The scalar (or constant tile) that every trip adds to a carried tile of pointers or indices, if it is so."""
    op = yielded.op
    if op is None or op.name not in ("tt.addptr", "arith.addi") or not argument.type.is_tile:
        return None
    others = [o for o in op.operands if o is not argument]
    if len(others) != 1 or (op.operands[0] is not argument and op.name == "tt.addptr"):
        return None
    step = others[0].op
    if step is None:
        return None
    if step.name == "tt.splat":
        return step.operands[0]
    return others[0] if step.name == "arith.constant" else None


class _Positions:
    """Where ops stand: their place in the text, their block, and the ops around them."""

    def __init__(self, func: Func) -> None:
        self.start: dict[Op, int] = {}
        self.end: dict[Op, int] = {}
        self.block: dict[Op, Block] = {}
        self.around: dict[Op, tuple[Op, ...]] = {}
        self.writes: list[int] = []
        self.visit(func.blocks, ())

    def visit(self, blocks: list[Block], around: tuple[Op, ...]) -> None:
        for block in blocks:
            for op in block.ops:
                self.start[op] = len(self.start)
                self.block[op], self.around[op] = block, around
                if op.name in WRITES:
                    self.writes.append(self.start[op])
                for region in op.regions:
                    self.visit(region, (*around, op))
                self.end[op] = len(self.start) - 1

    def written_between(self, load: Op, user: Op) -> bool:
        """Whether memory may change after the load and before (one of the times) the user runs."""
        chain = (*self.around[user], user)
        level = len(self.around[load])
        if level >= len(chain) or self.block[chain[level]] is not self.block[load]:
            return bool(self.writes)
        last = self.start[user] - 1 if chain[level] is user else self.end[chain[level]]
        return any(self.start[load] < w <= last for w in self.writes)

    def loops_between(self, op: Op, user: Op) -> bool:
        return any(o.name in LOOPS for o in self.around[user] if o not in self.around[op])


def analyse(func: Func) -> Plan:
    plan = Plan()
    for op in walk(func.blocks):
        if op.name == "scf.for":
            body = op.regions[0][0]
            for argument, initial, yielded in zip(body.args[1:], op.operands[3:], body.ops[-1].operands, strict=True):
                if induction_step(argument, yielded) is not None:
                    plan.strides.inductions[argument] = initial
    _Analysis(func, plan).run(func.blocks)
    return plan


class _Analysis:
    def __init__(self, func: Func, plan: Plan) -> None:
        self.plan = plan
        self.at = _Positions(func)
        self.costs: dict[Value, int] = {}
        self.loads: dict[Value, frozenset[Op]] = {}
        self.users: dict[Value, set[Op]] = {}  # ops whose nests evaluate the value
        self.groups: dict[Op, object] = {}  # nests that compute together count as one user
        self.forward(func.blocks)

    def forward(self, blocks: list[Block]) -> None:
        for op in walk(blocks):
            for result in op.results:
                if not result.type.is_tile:
                    continue
                if op.regions or op.name in ROOTS or op.name == "tt.join":
                    self.costs[result], self.loads[result] = 1, frozenset()
                    continue
                below = [o for o in op.operands if o.type.is_tile]
                cost = self.own_cost(op) + sum(self.costs.get(o, 1) for o in below)
                self.costs[result] = 1 if cost >= self.moved_cost(op) else min(1000, cost)
                own = frozenset([op]) if op.name == "tt.load" else frozenset()
                self.loads[result] = own.union(*(self.loads.get(o, frozenset()) for o in below))

    @staticmethod
    def moved_cost(op: Op) -> float:
        """The cost from which what the op moves is held, and then costs a read."""
        if op.name == "tt.expand_dims":
            return REPEATED
        if op.name == "tt.reshape" and keeps_runs(op.operands[0].type.shape, op.results[0].type.shape):
            return float("inf")
        return MOVED if op.name in ("tt.reshape", "tt.gather", "tt.cat") else float("inf")

    @staticmethod
    def own_cost(op: Op) -> int:
        if op.name in OWN_COST:
            return OWN_COST[op.name]
        return 0 if op.name in FREE else 2 if op.name == "tt.load" else 1

    def run(self, blocks: list[Block]) -> None:
        """Users before definitions, so that every value's users are known when it is decided on."""
        for block in reversed(blocks):
            open_group: tuple[tuple[int, ...], object] | None = None
            for op in reversed(block.ops):
                for region in reversed(op.regions):
                    if op.name not in ("tt.reduce", "tt.scan"):
                        self.run([region[0]] if len(region) == 1 else region)
                if op.regions or op.name in ROOTS or op.name in TERMINATORS or op.name == "tt.join":
                    self.root(op)
                    open_group = None
                    continue
                tiles = [r for r in op.results if r.type.is_tile]
                for result in tiles:
                    reason = self.reason(op, result)
                    if not reason:
                        continue
                    self.plan.forced[result] = reason
                    shape = result.type.shape
                    if open_group is None or open_group[0] != shape:
                        open_group = (shape, object())
                    self.groups[op] = open_group[1]
                if tiles:
                    self.pull(op, tiles)

    def root(self, op: Op) -> None:
        if op.name in WRITES:
            self.overwrites(op)
        for operand in op.operands:
            if operand.type.is_tile:
                self.users.setdefault(operand, set()).add(op)
                if op.name == "tt.dot" and operand is not op.operands[2] and self.costs.get(operand, 1) > OPERAND:
                    self.force(operand, "operand of a dot")
                if op.name == "scf.for":
                    self.carried(op, operand)

    def carried(self, op: Op, operand: Value) -> None:
        """The start of an induction is evaluated in every trip, and its loads at the loop."""
        if operand in self.plan.strides.inductions.values() and self.loads.get(operand):
            self.force(operand, "start of an induction that reads memory")

    def overwrites(self, op: Op) -> None:
        pointer = op.operands[0]
        strides = self.plan.strides.of(pointer) if pointer.type.is_tile else ()
        shape = pointer.type.shape
        whole = tuple(range(len(shape)))
        distinct = all(s not in (0, GENERAL) or n == 1 for s, n in zip(strides, shape, strict=True)) and len(shape) == 1
        for operand in op.operands:
            reads = self.reads(operand, whole) if operand.type.is_tile else ()
            if not all(distinct and load.operands[0] is pointer and place == whole for load, place in reads):
                self.force(operand, "a store that may overwrite what it reads")

    def reads(self, value: Value, place: Place) -> Iterator[tuple[Op, Place]]:
        """The loads that evaluating a tile does, each with the axes of the tile that its own axes follow."""
        seen: set[tuple[Value, Place]] = set()
        stack = [(value, place)]
        while stack:
            value, place = stack.pop()
            op = value.op
            if (value, place) in seen or op is None or not self.loads.get(value):
                continue
            seen.add((value, place))
            if op.name == "tt.load":
                yield op, place
            stack.extend(operand_places(op, place))

    def force(self, value: Value, reason: str) -> None:
        if value.op is not None and self.costs.get(value) is not None and not self.is_held(value.op):
            self.plan.forced.setdefault(value, reason)

    @staticmethod
    def is_held(op: Op) -> bool:
        return bool(op.regions) or op.name in ROOTS or op.name == "tt.join"

    def reason(self, op: Op, result: Value) -> str:
        users, cost = self.users.get(result, set()), self.costs[result]
        if not users:
            return ""
        if result in self.plan.forced:
            return self.plan.forced[result]
        if op.name == "tt.load" and any(self.at.written_between(op, u) for u in users):
            return "memory may change before it is used"
        if op.name == "tt.load" and len(op.operands) > 1 and any(self.at.loops_between(op, u) for u in users):
            return "masked, and used inside a loop"
        if cost >= SHARED and len({self.groups.get(u, u) for u in users}) > 1:
            return "dear, and used by several nests"
        if cost >= REPEATED and any(self.at.loops_between(op, u) for u in users):
            return "dear, and used inside a loop"
        return ""

    def pull(self, op: Op, results: list[Value]) -> None:
        """Operands are evaluated where the results are, or here if a result is held."""
        users: set[Op] = set()
        for result in results:
            users |= {op} if result in self.plan.forced else self.users.get(result, set())
        if not users:
            return
        for operand in op.operands:
            if not operand.type.is_tile:
                continue
            self.users.setdefault(operand, set()).update(users)
            if self.costs.get(operand, 1) >= self.moved_cost(op):
                self.force(operand, "dear, and broadcast" if op.name == "tt.expand_dims" else "dear, and moved")
