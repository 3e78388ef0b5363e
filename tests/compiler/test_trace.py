"""A forward function becomes the text of its op calls; what is no op call and no view of a value is refused."""

from dataclasses import dataclass

import pytest
import torch

from lychee.compiler import trace
from lychee.compiler.sizes import Size
from lychee.kernels import ContractError, embed, linear, rms_norm, swiglu
from lychee.kernels.types import TokenIds

TABLE, UP, DOWN, SCALE = torch.ones(9, 8), torch.ones(12, 8), torch.ones(8, 12), torch.ones(8)
NAMES = {t.data_ptr(): name for t, name in ((TABLE, "table"), (UP, "up"), (DOWN, "down"))}


@dataclass(frozen=True)
class Tokens:
    tokens: TokenIds
    longest: int


def traced(function):
    return trace(lambda tracer: function(tracer.struct(Tokens)), "cpu")


def mlp(given):
    x = embed(given.tokens, TABLE)
    y = linear(rms_norm(x, SCALE, 1e-5), UP)
    return linear(swiglu(y, y), DOWN)


def test_a_program_reads_as_its_calls_with_shapes_and_names():
    assert traced(mlp).text(NAMES) == (
        "(%tokens: i32[num_tokens])\n"
        "%0: f32[num_tokens, 8] = embed(%tokens, @table)\n"
        "%1: f32[num_tokens, 8] = rms_norm(%0, @1, eps=1e-05)\n"
        "%2: f32[num_tokens, 12] = linear(%1, @up)\n"
        "%3: f32[num_tokens, 12] = swiglu(%2, %2)\n"
        "%4: f32[num_tokens, 8] = linear(%3, @down)\n"
        "return %4: f32[num_tokens, 8]\n"
    )


def test_a_program_is_of_its_device_whether_there_is_one_or_not():
    program = trace(lambda tracer: embed(tracer.struct(Tokens).tokens, TABLE.to("meta")), "meta")
    assert [call.op.name for call in program.calls] == ["embed"]


def test_sizes_of_the_struct_are_symbols():
    program = traced(lambda given: rms_norm(embed(given.tokens, TABLE), SCALE, given.longest))
    assert "eps=longest" in str(program)


@pytest.mark.parametrize(
    ("view", "shape"),
    [
        (lambda x: x.view(-1), "8*num_tokens"),
        (lambda x: x.flatten(), "8*num_tokens"),
        (lambda x: x.view(-1, 2, 4), "num_tokens, 2, 4"),
        (lambda x: x.view(x.shape[0], 2, -1), "num_tokens, 2, 4"),
        (lambda x: x.view(x.shape[0], 2, 4).flatten(0, 1), "2*num_tokens, 4"),
        (lambda x: x.view(x.shape[0], 2, 4).flatten(1), "num_tokens, 8"),
        (lambda x: x.view(-1, 4).view_as(x), "num_tokens, 8"),
    ],
)
def test_views_have_the_shapes_of_a_tensor_of_any_number_of_tokens(view, shape):
    program = traced(lambda given: view(embed(given.tokens, TABLE)))
    assert f"return %0.view({shape}): f32[{shape}]" in str(program)
    for num_tokens in (1, 5):
        want = view(torch.zeros(num_tokens, 8)).shape
        assert program.results[0].concrete_shape({"num_tokens": num_tokens}) == want


@pytest.mark.parametrize("view", [lambda x: x.view(7), lambda x: x.view(-1, 7), lambda x: x.view(-1, x.shape[0] * 16)])
def test_a_view_that_no_number_of_tokens_has_is_refused(view):
    with pytest.raises(ValueError, match=r"has no view|as many elements"):
        traced(lambda given: view(embed(given.tokens, TABLE)))


def test_a_call_that_breaks_the_contract_is_refused_as_it_would_be_on_tensors():
    with pytest.raises(ContractError, match="linear: weight has in_features=12 where x has in_features=8"):
        traced(lambda given: linear(embed(given.tokens, TABLE), DOWN))
    with pytest.raises(ContractError, match="num_tokens"):
        traced(lambda given: swiglu(embed(given.tokens, TABLE), embed(given.tokens, TABLE).view(-1, 4)))


@pytest.mark.parametrize("wrong", [lambda x: x + 1, lambda x: torch.relu(x), lambda x: x.float(), lambda x: x[0:1]])
def test_torch_functions_of_a_value_are_refused(wrong):
    with pytest.raises((TypeError, AttributeError)):
        traced(lambda given: wrong(embed(given.tokens, TABLE)))


def test_a_choice_by_an_unknown_size_is_refused():
    with pytest.raises(ValueError, match="whether num_tokens is below 3 is not known"):
        traced(lambda given: embed(given.tokens, TABLE) if given.tokens.shape[0] < 3 else None)


def test_sizes_print_and_compute():
    size = (Size("n") * 6 - 3 + 1) // 2
    assert (str(size), size.of({"n": 5})) == ("3*n-1", 14)
    with pytest.raises(ValueError, match="multiple of 2"):
        Size("n", 3) // 2
