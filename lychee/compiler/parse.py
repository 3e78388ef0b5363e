"""From a program's text back to the program."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from lychee.kernels import OPS

from .program import DTYPE_NAMES, Call, Program, Value
from .sizes import Dim, Size

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
SIZE = re.compile(r"(?:(-?\d+)\*)?([a-zA-Z_]\w*)([+-]\d+)?")
VIEW = re.compile(r"%(\w+)(?:\[(.+):\])?(?:\.view\((.*)\))?")
SCALARS: dict[str, Any] = {"True": True, "False": False, "inf": float("inf"), "-inf": -float("inf")}


def parse(text: str, constants: Mapping[str, Any], device: torch.device | str) -> Program:
    """The program of `text`, as `Program.text(names)` wrote it; `constants` as `Program.constants(names)` has them.

    Its values are on `device`. Raises ValueError, naming the line, for what is no program's text.
    """
    reader = _Reader(constants, torch.device(device))
    first, *lines, last = text.strip().split("\n")
    inputs = tuple(map(reader.declared, _split(first.removeprefix("(").removesuffix(")"))))
    calls = []
    for number, line in enumerate(lines, 2):
        try:
            calls.append(reader.call(line))
        except (KeyError, IndexError, AttributeError, TypeError, SyntaxError) as error:
            raise ValueError(f"line {number} is no op call: {line!r} ({type(error).__name__}: {error})") from error
    if not last.startswith("return "):
        raise ValueError(f"the last line is {last!r}, must return values")
    results = (part.rpartition(": ") for part in _split(last.removeprefix("return ")))
    return Program(
        inputs, tuple(calls), tuple(reader.value(shown, typed[: typed.index("[")]) for shown, _, typed in results)
    )


class _Reader:
    def __init__(self, constants: Mapping[str, Any], device: torch.device) -> None:
        self.constants, self.device = constants, device
        self.values: dict[str, Value] = {}

    def declared(self, text: str) -> Value:
        """`%name: dtype[shape]`."""
        name, _, typed = text.partition(": ")
        dtype, _, shape = typed.removesuffix("]").partition("[")
        value = Value(name.removeprefix("%"), _shape(shape), DTYPES[dtype], self.device)
        return self.values.setdefault(value.name, value)

    def value(self, text: str, dtype: str | None = None) -> Value:
        """`%name`, or a part of it."""
        found = VIEW.fullmatch(text)
        if found is None:
            raise SyntaxError(f"{text!r} is no value")
        root = self.values[found[1]]
        if dtype is not None and DTYPES[dtype] is not root.dtype:
            raise ValueError(f"{text} is {DTYPE_NAMES[root.dtype]}, not {dtype}")
        if found[3] is None:
            return root
        return Value(root.name, _shape(found[3]), root.dtype, root.device, root, _scalar(found[2] or "0"))

    def call(self, line: str) -> Call:
        declared, equals, called = line.partition(" = ") if line.startswith("%") else ("", "", line)
        name, _, inside = called.partition("(")
        op = OPS[name]
        given = self.listed(op.contract.parameters, inside.removesuffix(")"), op.contract.structs)
        return Call(op, given, tuple(map(self.declared, _split(declared) if equals else ())))

    def listed(self, parameters: Sequence[str], text: str, structs: Mapping[str, type]) -> dict[str, Any]:
        """Arguments in the order of the parameters; those that are not given are None."""
        given: dict[str, Any] = dict.fromkeys(parameters)
        for place, part in enumerate(_split(text)):
            named = re.match(r"(\w+)=", part)
            key = named[1] if named else parameters[place]
            if key not in given:
                raise KeyError(f"there is no argument {key}")
            given[key] = self.argument(part[named.end() :] if named else part, structs.get(key))
        return given

    def argument(self, text: str, struct: type | None) -> Any:
        if text.startswith("%"):
            return self.value(text)
        if text.startswith("@"):
            return self.constants[text[1:]]
        if struct is not None and text.startswith(f"{struct.__name__}("):
            names = [f.name for f in fields(struct)]
            return struct(**self.listed(names, text[len(struct.__name__) + 1 : -1], {}))
        return _scalar(text)


def _scalar(text: str) -> Any:
    if text in SCALARS:
        return SCALARS[text]
    if found := SIZE.fullmatch(text):
        return Size(found[2], int(found[1] or 1), int(found[3] or 0))
    return literal_eval(text)


def _shape(text: str) -> tuple[Dim, ...]:
    return tuple(_scalar(size) for size in _split(text))


def _split(text: str) -> Iterator[str]:
    """Parts between the commas that are in no bracket."""
    depth, begin = 0, 0
    for at, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if char == "," and depth == 0:
            yield text[begin:at].strip()
            begin = at + 1
    if text[begin:].strip():
        yield text[begin:].strip()
