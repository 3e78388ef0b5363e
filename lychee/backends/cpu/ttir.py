"""Triton IR as Python objects: reads the generic form that MLIR prints, and prints it back in short.

MLIR falls back to its generic form, one grammar for every op, when a module does not verify. `generic_text` makes it so
by appending a dead constant after the entry function's last `tt.return`; the module is of no other use afterwards.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_UNREAD = {"overflowFlags", "fastmath", "boundaryCheck", "cache", "evict", "isVolatile", "operandSegmentSizes"}
FLOAT_BITS = {"f64": 64, "f32": 32, "f16": 16, "bf16": 16}


class ReadError(ValueError):
    """The text is not what this reader knows; the message shows where."""


@dataclass(frozen=True)
class Type:
    """A scalar (shape ()) or a tile. `elem` is i1 i8 i16 i32 i64 f16 bf16 f32 f64, or ptr with its `pointee`."""

    shape: tuple[int, ...]
    elem: str
    pointee: str = ""

    def __str__(self) -> str:
        elem = f"ptr<{self.pointee}>" if self.elem == "ptr" else self.elem
        return "x".join([*map(str, self.shape), elem])

    @property
    def is_tile(self) -> bool:
        return bool(self.shape)

    @property
    def size(self) -> int:
        """Elements."""
        size = 1
        for dim in self.shape:
            size *= dim
        return size

    def scalar(self) -> Type:
        return Type((), self.elem, self.pointee)


@dataclass(eq=False)
class Value:
    """An SSA value; `op` is None for the argument of a block, `index` its place among results or arguments."""

    name: str
    type: Type
    op: Op | None
    index: int

    def __repr__(self) -> str:
        return self.name


@dataclass(eq=False)
class Block:
    name: str
    args: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)


@dataclass(eq=False)
class Op:
    """`attrs` holds ints, bools, floats (as bit patterns where printed so) and raw text; `line` is "file:line"."""

    name: str
    operands: list[Value]
    results: list[Value]
    attrs: dict[str, Any]
    regions: list[list[Block]]
    successors: list[Block]
    line: str = ""

    def __repr__(self) -> str:
        return f"{self.name} at {self.line}"


@dataclass(frozen=True)
class Func:
    name: str
    args: list[Value]
    blocks: list[Block]

    def __str__(self) -> str:
        head = ", ".join(f"{a.name}: {a.type}" for a in self.args)
        return "\n".join([f"func {self.name}({head})", *_block_lines(self.blocks, "  ")])


def walk(blocks: list[Block]) -> Iterator[Op]:
    """Every op, outer before inner, in the order of the text."""
    for block in blocks:
        for op in block.ops:
            yield op
            for region in op.regions:
                yield from walk(region)


def _block_lines(blocks: list[Block], indent: str) -> Iterator[str]:
    for block in blocks:
        if block.args or len(blocks) > 1:
            yield f"{indent}^{block.name}({', '.join(f'{a.name}: {a.type}' for a in block.args)})"
        for op in block.ops:
            results = ", ".join(r.name for r in op.results)
            attrs = "".join(f" {k}={v}" for k, v in sorted(op.attrs.items()) if k not in _UNREAD)
            targets = "".join(f" ^{b.name}" for b in op.successors)
            types = ", ".join(str(r.type) for r in op.results)
            operands = "".join(f" {o.name}" for o in op.operands)
            yield f"{indent}{results}{' = ' if results else ''}{op.name}{operands}{attrs}{targets}" + (
                f" : {types}" if types else ""
            )
            for number, region in enumerate(op.regions):
                if number:
                    yield f"{indent}--"
                yield from _block_lines(region, indent + "  ")


def generic_text(module: Any) -> str:
    """The text of a Triton module (`triton._C.libtriton.ir.module`) in generic form, with locations."""
    from triton._C.libtriton import ir

    returns: list[Any] = []
    module.walk(lambda op: returns.append(op.get_block()) if op.get_name() == "tt.return" else None)
    builder = ir.builder(module.context)
    builder.set_insertion_point_to_end(returns[-1])
    builder.get_int32(0)
    text = str(module.str())
    if '"builtin.module"()' not in text:
        raise ReadError("this Triton does not print invalid modules in MLIR's generic form: it is not supported")
    return text


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|->|[%^@#!][\w\.\$#:-]*|[A-Za-z_][\w\.\$]*|-?\d[\w\.\+\-]*|//[^\n]*|\S')
_LOC = re.compile(r"^(#loc\d*) = loc\((.*)\)$", re.MULTILINE)
_FILE = re.compile(r'"([^"]*)" ?: ?(\d+)')


def _lines(text: str) -> dict[str, str]:
    """The outermost source line of each location alias: the kernel's own, not the library function's it calls."""
    raw = dict(_LOC.findall(text))
    known: dict[str, str] = {}

    def resolve(name: str) -> str:
        if name not in known:
            known[name] = ""
            body = raw.get(name, "")
            direct: re.Match[str] | None = _FILE.search(body)
            inner = re.findall(r"#loc\d*", body)
            if direct:
                known[name] = f"{direct[1]}:{direct[2]}"
            elif inner:
                known[name] = next((line for line in map(resolve, reversed(inner)) if line), "")
        return known[name]

    return {name: resolve(name) for name in raw}


class _Reader:
    def __init__(self, text: str) -> None:
        self.lines = _lines(text)
        body = text[text.index('"builtin.module"') :]
        self.tokens: list[str] = [t for t in _TOKEN.findall(body) if not t.startswith("//")]
        self.at = 0
        self.values: dict[str, Value] = {}

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def next(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1]

    def eat(self, token: str) -> bool:
        if self.peek() != token:
            return False
        self.at += 1
        return True

    def expect(self, token: str) -> None:
        if not self.eat(token):
            raise ReadError(f"expected {token} in Triton's IR, found {' '.join(self.tokens[self.at : self.at + 8])}")

    def raw(self, *stops: str) -> str:
        """The text up to one of `stops` outside any bracket."""
        depth, start = 0, self.at
        while depth or self.peek() not in stops:
            token = self.next()
            depth += (token in ("(", "<", "[", "{")) - (token in (")", ">", "]", "}"))
        return " ".join(self.tokens[start : self.at])

    def type(self) -> Type:
        start = self.at
        self.at += 1
        if self.peek() == "<":
            depth = 0
            while True:
                token = self.next()
                depth += (token == "<") - (token == ">")
                if depth == 0:
                    break
        return read_type("".join(self.tokens[start : self.at]))

    def types(self) -> list[Type]:
        if not self.eat("("):
            return [self.type()]
        found = []
        while not self.eat(")"):
            found.append(self.type())
            self.eat(",")
        return found

    def location(self) -> str:
        if not self.eat("loc"):
            return ""
        self.expect("(")
        text = self.raw(")")
        self.expect(")")
        direct = _FILE.search(text)
        return f"{direct[1]}:{direct[2]}" if direct else self.lines.get(text, "")

    def attributes(self, close: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self.eat(close):
            key = self.next().strip('"')
            found[key] = _attribute(self.raw(",", close)) if self.eat("=") else True
            self.eat(",")
        return found

    def op(self, blocks: dict[str, Block]) -> Op:
        names: list[str] = []
        if self.peek().startswith("%"):
            while True:
                name, _, count = self.next().partition(":")
                names += [name] if not count else [f"{name}#{i}" for i in range(int(count))]
                if not self.eat(","):
                    break
            self.expect("=")
        op = Op(self.next().strip('"'), [], [], {}, [], [])
        self.expect("(")
        while not self.eat(")"):
            op.operands.append(self.values[self.next()])
            self.eat(",")
        if self.eat("["):
            while not self.eat("]"):
                name = self.next()[1:]
                op.successors.append(blocks.setdefault(name, Block(name)))
                self.eat(",")
        if self.eat("<"):
            self.expect("{")
            op.attrs = self.attributes("}")
            self.expect(">")
        if self.eat("("):
            while not self.eat(")"):
                op.regions.append(self.region())
                self.eat(",")
        if self.eat("{"):
            op.attrs |= self.attributes("}")
        self.expect(":")
        self.types()
        self.expect("->")
        for index, (name, kind) in enumerate(zip(names, self.types(), strict=False)):
            self.values[name] = Value(name, kind, op, index)
            op.results.append(self.values[name])
        op.line = self.location()
        return op

    def region(self) -> list[Block]:
        """The blocks of a region; values keep their module-wide names, which MLIR never reuses inside a scope."""
        self.expect("{")
        outer = dict(self.values)
        blocks: dict[str, Block] = {}
        ordered: list[Block] = []
        while not self.eat("}"):
            if self.peek().startswith("^"):
                name = self.next()[1:].rstrip(":")
                block = blocks.setdefault(name, Block(name))
                if self.eat("("):
                    while not self.eat(")"):
                        name = self.next().rstrip(":")
                        self.eat(":")
                        value = Value(name, self.type(), None, len(block.args))
                        self.location()
                        self.values[name] = value
                        block.args.append(value)
                        self.eat(",")
                self.eat(":")
                ordered.append(block)
            else:
                if not ordered:
                    ordered.append(blocks.setdefault("entry", Block("entry")))
                ordered[-1].ops.append(self.op(blocks))
        self.values = outer
        return ordered


def read_type(text: str) -> Type:
    found = re.fullmatch(r"tensor<((?:\d+x)*)(.*)>", text)
    shape = tuple(int(d) for d in found[1].split("x") if d) if found else ()
    elem = found[2] if found else text
    pointer = re.fullmatch(r"!tt\.ptr<(.*?)(?:,\d+)?>", elem)
    return Type(shape, "ptr", pointer[1]) if pointer else Type(shape, elem)


def _attribute(text: str) -> Any:
    value, _, kind = text.partition(" : ")
    if found := re.fullmatch(r"dense < (\S+) > : (.*)", text):
        value, kind = found[1], found[2]
    if value.startswith("array <"):
        return [int(v) for v in re.findall(r"-?\d+", value.partition(":")[2] + kind)]
    if value in ("true", "false"):
        return value == "true"
    if re.fullmatch(r"-?\d+|0x[0-9A-Fa-f]+", value) or re.fullmatch(r"-?\d+\.\d*([eE][+-]?\d+)?", value):
        elem = read_type(kind.replace(" ", "")).elem if kind else "i64"
        if elem in FLOAT_BITS:
            return _bits_to_float(int(value, 16), elem) if value.startswith("0x") else float(value)
        return int(value, 0)
    return text


def _bits_to_float(bits: int, elem: str) -> float:
    if elem == "bf16":
        bits, elem = bits << 16, "f32"
    code, integer = {"f64": ("<d", "<Q"), "f32": ("<f", "<I"), "f16": ("<e", "<H")}[elem]
    return float(struct.unpack(code, struct.pack(integer, bits))[0])


def read(text: str) -> Func:
    """The one function of a module in generic form."""
    reader = _Reader(text)
    module = reader.op({})
    functions = [op for op in module.regions[0][0].ops if op.name == "tt.func"]
    if len(functions) != 1:
        raise ReadError(
            f"the kernel calls {len(functions) - 1} functions that are not inlined (noinline=True): remove noinline"
        )
    blocks = functions[0].regions[0]
    last = blocks[-1].ops
    while last and not last[-1].name.endswith(("return", "br", "cond_br")):
        last.pop()  # the constant that generic_text appended
    return Func(str(functions[0].attrs["sym_name"]).strip('"'), blocks[0].args, blocks)
