"""A call of an op as generated code: check the contract, allocate, launch, with nothing between but attribute reads.

For `rms_norm(x, weight, eps)` it reads, shortened:

    def rms_norm(x, weight, eps):
        sound = False
        try:
            if type(eps) is not float: raise ValueError
            checked = x
            if not isinstance(checked, Tensor): raise ValueError
            (size_0, size_1, ) = checked.shape
            axis_num_tokens = size_0
            axis_hidden = size_1
            dtype_float32_or_float16 = checked.dtype
            common_device = checked.device
            if dtype_float32_or_float16 not in float32_or_float16 or not checked.is_contiguous() ...: raise ValueError
            checked = weight
            if not isinstance(checked, Tensor): raise ValueError
            (size_0, ) = checked.shape
            if axis_hidden != size_0 or checked.dtype is not dtype_float32_or_float16 or ...: raise ValueError
            sound = True
        except ValueError:
            pass
        if not sound: return otherwise(x, weight, eps)
        output_0 = empty_like(x)
        launch(output_0, x, weight, eps)
        return output_0

A struct's tensors are checked in its first call; what was found, its axes and device, stays with the (frozen) struct.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .specs import struct_specs
from .types import Scratch, Spec

if TYPE_CHECKING:
    from .contract import Contract


def call_code(
    contract: Contract,
    launch: Callable[..., None],
    scratch: Callable[..., Scratch] | None,
    otherwise: Callable[..., Any],
) -> Callable[..., Any]:
    """A function of the op's signature. Raises ValueError where an output's axis or dtype is in no required input.

    A call that breaks the contract goes to `otherwise`, and so do a few unusual sound ones: an int given for a float, a
    symbol for a number, a struct that may be None and is not, or is of a subclass, a tensor that may be None and has an
    axis, dtype or device of its own.
    """
    code = _Call(contract)
    maybe: list[tuple[str, Spec]] = []
    for key, spec in contract.inputs.items():
        if key in contract.optional:
            maybe.append((key, spec))
        else:
            code.tensor(key, spec)
    for key, struct in contract.structs.items():
        if key in contract.optional:
            code.refuse_if(f"{key} is not None")
            continue
        code.refuse_if(f"type({key}) is not {code.named(struct.__name__, struct)}")
        code.struct(key, struct)
        specs, optional = contract.struct_specs(key)
        maybe += [(f"{key}.{field}", spec) for field, spec in specs.items() if field in optional]
    for value, spec in maybe:
        code.tensor_or_none(value, spec)
    return code.function(launch, scratch, otherwise)


class _Code:
    """The lines of a function so far, the objects they name, and the variables that hold a value by now."""

    def __init__(self, head: str) -> None:
        self.scope: dict[str, Any] = {"Tensor": Tensor}
        self.known: set[str] = set()
        self.lines, self.indent = [head], "    "

    def named(self, name: str, value: Any) -> str:
        self.scope[name] = value
        return name

    def line(self, text: str) -> None:
        self.lines.append(self.indent + text)

    def assign(self, variable: str, value: str) -> None:
        self.line(f"{variable} = {value}")
        self.known.add(variable)

    def refuse_if(self, *conditions: str) -> None:
        self.line(f"if {' or '.join(conditions)}: raise ValueError")

    def tensor(self, value: str, spec: Spec) -> None:
        """The value must be a tensor of this spec. What of it was not known before is known after."""
        dtype, conditions = self._dtype(spec), []
        self.line(f"checked = {value}")
        self.refuse_if("not isinstance(checked, Tensor)")
        self.line(f"({''.join(f'size_{i}, ' for i in range(len(spec.parsed)))}) = checked.shape")
        for i, (axis, more) in enumerate(spec.parsed):
            size = f"size_{i} - {more}" if more else f"size_{i}"
            conditions += [f"size_{i} < {more}"] if more else []
            if f"axis_{axis}" in self.known:
                conditions.append(f"axis_{axis} != {size}")
            else:
                self.assign(f"axis_{axis}", size)
        if len(spec.dtypes) == 1 or dtype in self.known:
            conditions.append(f"checked.dtype is not {dtype}")
        else:
            self.assign(dtype, "checked.dtype")
            conditions.append(f"{dtype} not in {self.named(dtype.removeprefix('dtype_'), spec.dtypes)}")
        if "common_device" in self.known:
            conditions.append("checked.device != common_device")
        else:
            self.assign("common_device", "checked.device")
        self.refuse_if(*conditions, "not checked.is_contiguous()", "checked.is_neg()")

    def compiled(self, title: str) -> Any:
        """The function that the lines define."""
        text, file = "\n".join(self.lines), f"<{title}>"
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file  # for tracebacks
        exec(compile(text, file, "exec"), self.scope)
        return self.scope[self.lines[0].removeprefix("def ").partition("(")[0]]

    def _dtype(self, spec: Spec) -> str:
        """The name of the only dtype, or of the variable that holds the one chosen from the set."""
        names = [str(dtype).removeprefix("torch.") for dtype in spec.dtypes]
        if len(names) == 1:
            return self.named(names[0], spec.dtypes[0])
        return f"dtype_{'_or_'.join(names)}"


@cache
def _facts_code(struct: type) -> tuple[Callable[[Any], tuple[Any, ...]], tuple[str, ...]]:
    """A function that checks a struct's required tensors and leaves their facts with it, and the facts' variables.

    It raises ValueError where they do not fit each other or their specs.
    """
    code, (specs, optional) = _Code("def facts(struct):"), struct_specs(struct)
    for field, spec in specs.items():
        if field not in optional:
            code.tensor(f"struct.{field}", spec)
    variables = tuple(sorted(code.known))
    code.line(f"struct.__dict__['_facts'] = found = ({', '.join(variables)},)")
    code.line("return found")
    return code.compiled(f"facts of {struct.__name__}"), variables


class _Call(_Code):
    """The function that an op's call is."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        super().__init__("")
        self.scope |= {"empty": torch.empty, "empty_like": torch.empty_like}
        defaults = {key: f"={self.named(f'default_{key}', value)}" for key, value in contract.defaults.items()}
        self.lines = [f"def {contract.name}({', '.join(key + defaults.get(key, '') for key in contract.parameters)}):"]
        self.line("sound = False")
        self.line("try:")
        self.indent = "        "
        scalars = [f"type({key}) is not {kind.__name__}" for key, kind in contract.scalars.items()]
        scalars += [f"{key} < 0" for key in contract.scalars if key in contract.axes]
        if scalars:
            self.refuse_if(*scalars)
        for key in contract.scalars:
            if key in contract.axes:
                self.assign(f"axis_{key}", key)

    def struct(self, key: str, struct: type) -> None:
        """The struct's tensors must fit, each other and what is known. What they tell is known after."""
        make, variables = _facts_code(struct)
        made = self.named(f"facts_of_{struct.__name__}", make)
        self.line(f"facts = {key}.__dict__.get('_facts')")
        self.line(f"if facts is None: facts = {made}({key})")
        self.line(f"({''.join(f'its_{v}, ' for v in variables)}) = facts")
        if clashes := [f"{v} != its_{v}" for v in variables if v in self.known]:
            self.refuse_if(*clashes)
        for v in variables:
            if v not in self.known:
                self.assign(v, f"its_{v}")

    def tensor_or_none(self, value: str, spec: Spec) -> None:
        """The same of a value that may be None; a tensor that would make something known is refused."""
        if not self.known.issuperset(["common_device", *self._variables(spec)]):
            self.refuse_if(f"{value} is not None")
            return
        self.line(f"if {value} is not None:")
        self.indent += "    "
        self.tensor(value, spec)
        self.indent = self.indent[:-4]

    def function(
        self, launch: Callable[..., None], scratch: Callable[..., Scratch] | None, otherwise: Callable[..., Any]
    ) -> Callable[..., Any]:
        arguments = ", ".join(self.contract.parameters)
        self.line("sound = True")
        self.indent = "    "
        self.line("except ValueError:")
        self.line("    pass")
        self.line(f"if not sound: return otherwise({arguments})")
        outputs = [f"output_{i}" for i in range(len(self.contract.outputs))]
        for output, spec in zip(outputs, self.contract.outputs, strict=True):
            if missing := [name for name in self._variables(spec) if name not in self.known]:
                raise ValueError(f"op {self.contract.name}: an output has {missing[0]}, which no input always gives")
            self.line(f"{output} = {self._empty(spec)}")
        made = list(outputs)
        if scratch is not None:
            made.append("*buffers")
            made_of = "empty(*buffer[0], dtype=buffer[1], device=common_device) if buffer else None"
            self.line(f"buffers = [{made_of} for buffer in scratch({arguments}).values()]")
        self.line(f"launch({', '.join([*made, arguments])})")
        self.line(f"return {', '.join(outputs) or None}")
        self.scope.update(launch=launch, scratch=scratch, otherwise=otherwise)
        call: Callable[..., Any] = self.compiled(f"call of {self.contract.name}")
        return call

    def _empty(self, spec: Spec) -> str:
        """A new tensor; the quickest way that torch has."""
        required = ((key, s) for key, s in self.contract.inputs.items() if key not in self.contract.optional)
        if alike := [key for key, s in required if (s.axes, s.dtypes) == (spec.axes, spec.dtypes)]:
            return f"empty_like({alike[0]})"
        # Sizes one by one: a tuple of them takes half a microsecond longer to read.
        sizes = "".join(f"axis_{axis} + {more}, " if more else f"axis_{axis}, " for axis, more in spec.parsed)
        return f"empty({sizes}dtype={self._dtype(spec)}, device=common_device)"

    def _variables(self, spec: Spec) -> list[str]:
        """What must be known of a tensor of this spec before one can be made."""
        chosen = [self._dtype(spec)] if len(spec.dtypes) > 1 else []
        return [*(f"axis_{axis}" for axis, _ in spec.parsed), *chosen]
