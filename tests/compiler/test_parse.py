"""A program is what its text and its constants say: reading them gives the same program."""

from dataclasses import fields, is_dataclass

import pytest
import torch

from lychee.compiler import lower, parse
from lychee.compiler.program import Value, is_constant, key_of
from tests.compiler.test_lower import PROGRAM, run, some
from tests.kernels.batches import bits


def plain(argument):
    """All that there is to an argument, as tuples that can be compared."""
    if isinstance(argument, Value):
        own = argument.name, argument.shape, argument.dtype, argument.device, argument.offset
        return (*own, None if argument.root is argument else plain(argument.root))
    if is_constant(argument):
        return key_of(argument)
    if is_dataclass(argument):
        return type(argument), tuple(plain(getattr(argument, f.name)) for f in fields(argument))
    return argument.__class__, argument


def same(a, b):
    assert len(a.calls) == len(b.calls)
    for x, y in zip(a.calls, b.calls, strict=True):
        assert x.op is y.op
        assert list(map(plain, x.outputs)) == list(map(plain, y.outputs))
        given, parsed = ({k: plain(v) for k, v in call.arguments.items()} for call in (x, y))
        assert list(given.items()) == list(parsed.items())
    for values, others in ((a.inputs, b.inputs), (a.results, b.results)):
        assert list(map(plain, values)) == list(map(plain, others))


def parsed(program, names):
    return parse(program.text(names), program.constants(names), "cpu")


def test_reading_a_program_that_was_written_gives_the_same_program():
    again = parsed(PROGRAM, {})
    same(PROGRAM, again)
    assert str(again) == str(PROGRAM)
    tokens = some(5, 3)
    assert bits(run(lower(again, {"num_tokens": 5}), tokens)) == bits(run(lower(PROGRAM, {"num_tokens": 5}), tokens))


def test_two_tensors_of_one_name_stay_apart():
    addresses = {c.data_ptr(): "same" for c in PROGRAM.constants({}).values()}
    constants = PROGRAM.constants(addresses)
    assert len(constants) == len(PROGRAM.constants({})) > 3
    same(PROGRAM, parsed(PROGRAM, addresses))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rms_norm(%0", "norm(%0", r"line 3 is no op call: .*KeyError: 'norm'"),
        ("rms_norm(%0", "rms_norm(%nine", "line 3 is no op call: .*KeyError: 'nine'"),
        ("eps=", "epsilon=", "line 3 is no op call: .*there is no argument epsilon"),
        ("return", "give", "the last line is 'give .*, must return values"),
        ("return %13: f32", "return %13: f16", "%13 is f32, not f16"),
    ],
)
def test_what_is_no_program_is_refused_with_its_line(old, new, message):
    last = str(PROGRAM).rsplit("%", 1)[1].split(":")[0]
    text = str(PROGRAM).replace(old.replace("%13", f"%{last}"), new.replace("%13", f"%{last}"), 1)
    assert text != str(PROGRAM)
    with pytest.raises(ValueError, match=message.replace("%13", f"%{last}")):
        parse(text, PROGRAM.constants({}), torch.device("cpu"))
