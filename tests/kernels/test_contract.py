"""What an op refuses, and the sentence it refuses with; launches and samples fit the reference's signature."""

import inspect
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Annotated

import numpy as np
import pytest
import torch
from torch import Tensor

from lychee.kernels import OPS, ContractError, add_rms_norm, embed, linear, rms_norm
from lychee.kernels.call_code import call_code
from lychee.kernels.op import Op, op
from lychee.kernels.types import F32, FLOAT, I32, Cost, Hidden, Spec
from tests.conftest import DEVICE


def ones(*shape, dtype=torch.float32, device=DEVICE):
    return torch.ones(*shape, dtype=dtype, device=device)


def refused(call, sentence, error=ContractError):
    with pytest.raises(error) as info:
        call()
    assert str(info.value) == sentence


def test_axis_mismatch_names_both_arguments():
    refused(lambda: rms_norm(ones(2, 4), ones(5), 1e-6), "rms_norm: weight has hidden=5 where x has hidden=4")
    refused(
        lambda: add_rms_norm(ones(2, 4), ones(3, 4), ones(4), 1e-6),
        "add_rms_norm: residual has num_tokens=3 where x has num_tokens=2",
    )


def test_wrong_dtype_names_what_is_allowed():
    refused(
        lambda: rms_norm(ones(2, 4, dtype=torch.float64), ones(4), 1e-6),
        "rms_norm: x is torch.float64, must be float32 or float16 or bfloat16",
    )
    refused(lambda: embed(ones(2, dtype=torch.int64), ones(3, 4)), "embed: tokens is torch.int64, must be int32")


def test_dtypes_of_one_set_agree():
    refused(
        lambda: rms_norm(ones(2, 4), ones(4, dtype=torch.float16), 1e-6),
        "rms_norm: weight is torch.float16 where x is torch.float32",
    )


def test_wrong_rank_names_the_axes():
    refused(lambda: rms_norm(ones(4), ones(4), 1e-6), "rms_norm: x has shape (4,), must be [num_tokens hidden]")


def test_non_contiguous_tensor_is_refused():
    refused(lambda: rms_norm(ones(4, 2).t(), ones(4), 1e-6), "rms_norm: x is not contiguous (strides (1, 2))")


def test_a_tensor_still_to_be_negated_is_refused():
    sentence = "rms_norm: x is a view that is still to be negated, must be given as its resolve_neg()"
    lazy = torch._neg_view(ones(2, 4))
    refused(lambda: rms_norm(lazy, ones(4), 1e-6), sentence)
    torch.testing.assert_close(rms_norm(lazy.resolve_neg(), ones(4), 1e-6), -ones(2, 4))


@pytest.mark.parametrize("eps", ["a", None, True, torch.tensor(1e-6), np.float32(1e-6), [1e-6]], ids=repr)
def test_a_scalar_of_another_type_is_refused(eps):
    refused(lambda: rms_norm(ones(2, 4), ones(4), eps), f"rms_norm: eps is {eps!r}, must be a float")


def test_an_int_or_a_kind_of_float_may_stand_for_a_float():
    for eps in (0, np.float64(0)):
        torch.testing.assert_close(rms_norm(ones(2, 4), ones(4), eps), ones(2, 4))


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("num_samples", -1, "must be at least 0"),
        ("num_samples", 1.0, "must be an int"),
        ("num_samples", True, "must be an int"),
        ("stream", "0", "must be an int"),
        ("replacement", 1, "must be True or False"),
        ("replacement", None, "must be True or False"),
    ],
)
def test_ints_and_flags_are_what_they_say(key, value, allowed):
    arguments = {**small_arguments("draw"), key: value}
    refused(lambda: OPS["draw"](**arguments), f"draw: {key} is {value!r}, {allowed}")


@pytest.mark.parametrize("name", [name for name, face in OPS.items() if face.contract.scalars])
def test_every_scalar_of_every_op_is_checked(name):
    face, arguments = OPS[name], small_arguments(name)
    for key in face.contract.scalars:
        with pytest.raises(ContractError, match=f"{name}: {key} is 'a', must be "):
            face(**{**arguments, key: "a"})


def test_tensors_on_two_devices_are_refused():
    refused(
        lambda: rms_norm(ones(2, 4), ones(4, device="meta"), 1e-6),
        f"rms_norm: weight is on meta where another argument is on {ones(1).device}",
    )


def test_something_else_than_a_tensor_is_refused():
    refused(lambda: rms_norm([[1.0]], ones(1), 1e-6), "rms_norm: x is list, must be a tensor of [num_tokens hidden]")
    refused(lambda: rms_norm(ones(2, 4), None, 1e-6), "rms_norm: weight is NoneType, must be a tensor of [hidden]")


def test_arguments_are_matched_as_python_would():
    x, weight = ones(2, 4), ones(4)
    refused(lambda: rms_norm(x, weight), "rms_norm() missing 1 required positional argument: 'eps'", TypeError)
    taken = "rms_norm() takes 3 positional arguments but 4 were given"
    refused(lambda: rms_norm(x, weight, 1e-6, 1), taken, TypeError)
    unknown = "rms_norm() got an unexpected keyword argument 'scale'"
    refused(lambda: rms_norm(x, weight, 1e-6, scale=1), unknown, TypeError)
    twice = "rms_norm() got multiple values for argument 'x'"
    refused(lambda: rms_norm(x, weight, 1e-6, x=x), twice, TypeError)
    torch.testing.assert_close(rms_norm(eps=1e-6, weight=weight, x=x), x)


def test_optional_tensor_may_be_absent_and_is_checked_when_present():
    x, weight = ones(2, 4), ones(3, 4)
    expected = torch.full((2, 3), 4.0, device=DEVICE)
    torch.testing.assert_close(linear(x, weight), expected)
    torch.testing.assert_close(linear(x, weight, None), expected)
    torch.testing.assert_close(linear(x, weight, ones(3)), expected + 1)
    refused(lambda: linear(x, weight, ones(2)), "linear: bias has out_features=2 where weight has out_features=3")


@dataclass(frozen=True)
class Rows:
    starts: Annotated[Tensor, Spec("num_seqs+1", I32)]
    scale: Annotated[Tensor, Spec("hidden", FLOAT)] | None
    block_size: int


def scatter_reference(x: Hidden, rows: Rows, hidden: int) -> Annotated[Tensor, Spec("num_seqs hidden", F32)]:
    return x.new_zeros(rows.starts.numel() - 1, hidden, dtype=torch.float32)


def scatter(y, x, rows, hidden):
    y.zero_()


SCATTER = Op(scatter, scatter_reference, lambda dtype, device: {}, lambda **_: Cost(0, 0), {}, None)


def test_struct_fields_are_checked_like_arguments():
    starts = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    assert SCATTER(ones(2, 4), Rows(starts, ones(4), 16), 4).shape == (2, 4)
    assert SCATTER(ones(2, 4), Rows(starts, None, 16), 4).shape == (2, 4)
    refused(
        lambda: SCATTER(ones(2, 4), Rows(starts, ones(5), 16), 4),
        "scatter: rows.scale has hidden=5 where the argument has hidden=4",
    )
    refused(
        lambda: SCATTER(ones(2, 4), Rows(starts.long(), None, 16), 4),
        "scatter: rows.starts is torch.int64, must be int32",
    )
    refused(
        lambda: SCATTER(ones(2, 4), Rows(None, None, 16), 4),
        "scatter: rows.starts is NoneType, must be a tensor of [num_seqs+1]",
    )
    refused(lambda: SCATTER(ones(2, 4), None, 4), "scatter: rows is NoneType, must be Rows")
    refused(lambda: SCATTER(ones(2, 4), starts, 4), "scatter: rows is Tensor, must be Rows")


def test_optional_struct_may_be_absent_and_is_checked_when_present():
    def reference(x: Hidden, rows: Rows | None = None) -> Hidden:
        return x

    def keep(y, x, rows):
        y.copy_(x)

    maybe = Op(keep, reference, lambda dtype, device: {}, lambda **_: Cost(0, 0), {}, None)
    x = ones(2, 4)
    torch.testing.assert_close(maybe(x), x)
    starts = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    refused(lambda: maybe(x, Rows(starts, ones(5), 16)), "keep: rows.scale has hidden=5 where x has hidden=4")


def test_an_axis_given_as_a_number_binds_the_tensors():
    starts = torch.tensor([0, 2], dtype=torch.int32, device=DEVICE)
    refused(
        lambda: SCATTER(ones(2, 4), Rows(starts, None, 16), 3),
        "scatter: x has hidden=4 where the argument has hidden=3",
    )


def test_a_prefix_sum_is_never_empty():
    refused(
        lambda: SCATTER(ones(2, 4), Rows(torch.empty(0, dtype=torch.int32, device=DEVICE), None, 16), 4),
        "scatter: rows.starts has shape (0,), must be [num_seqs+1]",
    )


def small_arguments(name):
    face = OPS[name]
    sizes = {axis: min(size, 8) for axis, size in face.typical.items()}
    return face.contract.arguments((), face.sample(torch.float32, DEVICE, **sizes))


def changed(arguments, key, value):
    """The arguments with `argument` or `struct.field` replaced."""
    first, _, field = key.partition(".")
    return {**arguments, first: replace(arguments[first], **{field: value}) if field else value}


def spoilt(tensor):
    """Tensors that differ from this one in a single respect of the contract, and things that are no tensor."""
    for axis in range(tensor.ndim):
        yield torch.cat([tensor, tensor.narrow(axis, 0, 1)], axis).contiguous()
        yield tensor.narrow(axis, 0, 0).contiguous()
    yield tensor.to(torch.float64 if tensor.dtype is not torch.float64 else torch.float32)
    yield tensor.to(torch.float16)
    yield tensor[None]
    yield tensor.new_zeros(*tensor.shape, 2)[..., 0]  # strided
    yield tensor.to("meta")
    yield SimpleNamespace(shape=tensor.shape, dtype=tensor.dtype, device=tensor.device, is_contiguous=lambda: True)
    yield from (None, 1, [1.0], tensor.cpu().numpy())


@pytest.mark.parametrize("name", OPS)
def test_generated_code_runs_the_samples_and_nothing_that_the_check_refuses(name):
    face, arguments = OPS[name], small_arguments(name)
    launched = []

    def launch(*args):
        launched.append(args)

    def outcome(given):
        """Shapes, dtypes and devices of what the launch was given besides the arguments; None if it did not run."""
        launched.clear()
        call(**given)
        own = launched[0][: -len(given)] if launched else ()
        assert not launched or all(a is b for a, b in zip(launched[0][-len(given) :], given.values(), strict=True))
        return [t is None or (t.shape, t.dtype, t.device) for t in own] if launched else None

    call = call_code(face.contract, launch, face.scratch, lambda *args: None)
    slow = Op(launch, face.reference, face.sample, face.cost, face.typical, face.scratch)

    def expected_outcome(given):
        launched.clear()
        slow.launch = lambda *args, **kwargs: launched.append(args)
        slow.run(given, face.contract.check(given))
        return [t is None or (t.shape, t.dtype, t.device) for t in launched[0]]

    assert outcome(arguments) == expected_outcome(arguments)
    refusals = 0
    for key, _, tensor in list(face.contract.tensors(arguments)):
        for value in spoilt(tensor):
            given = changed(arguments, key, value)
            try:
                expected = expected_outcome(given)
            except ContractError:
                refusals += 1
                assert outcome(given) is None, key
            else:
                assert outcome(given) in (None, expected), key
    assert refusals > 5


def test_an_output_whose_axis_no_input_always_gives_is_refused():
    def reference(x: Hidden) -> Annotated[Tensor, Spec("num_tokens vocab", F32)]: ...

    def lost(y, x): ...

    with pytest.raises(ValueError, match="op lost: an output has axis_vocab, which no input always gives"):
        Op(lost, reference, lambda dtype, device: {}, lambda **_: Cost(0, 0), {}, None)


def test_outputs_take_the_shapes_and_dtype_of_the_contract():
    def launch(y, total, x, residual, weight, eps):
        assert (y.shape, y.dtype, total.shape, total.dtype) == ((3, 5), torch.float16, (3, 5), torch.float16)
        y.fill_(1)
        total.fill_(2)

    face = add_rms_norm
    fake = Op(launch, face.reference, face.sample, face.cost, face.typical, None)
    arguments = face.sample(torch.float16, DEVICE, num_tokens=3, hidden=5)
    y, total = fake.run(arguments, fake.contract.check(arguments))
    assert bool((y == 1).all())
    assert bool((total == 2).all())


def test_an_op_is_registered_once_and_has_a_typical_size_for_every_axis():
    def fresh(y: Tensor, x: Tensor, weight: Tensor, eps: float) -> None: ...

    faces = {"reference": rms_norm.reference, "sample": rms_norm.sample, "cost": rms_norm.cost}
    with pytest.raises(ValueError, match="op fresh: typical has \\['hidden'\\], sample takes"):
        op(**faces, typical={"hidden": 1})(fresh)
    assert "fresh" not in OPS
    fresh.__name__ = "rms_norm"
    with pytest.raises(ValueError, match="op rms_norm is registered twice"):
        op(**faces, typical=rms_norm.typical)(fresh)
    assert OPS["rms_norm"] is rms_norm


@pytest.mark.parametrize("name", OPS)
def test_faces_agree_on_their_arguments(name):
    face = OPS[name]
    inputs = list(face.contract.parameters)
    launch = list(inspect.signature(face.launch).parameters)
    sizes = {axis: min(size, 8) for axis, size in face.typical.items()}
    sample = face.sample(torch.float32, DEVICE, **sizes)
    assert set(sample) <= set(inputs)
    arguments = face.contract.arguments((), sample)
    face.contract.check(arguments)
    scratch = list(face.scratch(**arguments)) if face.scratch else []
    assert launch[-len(inputs) :] == inputs
    assert launch[len(face.contract.outputs) : -len(inputs)] == scratch
    assert face.cost(**arguments).bytes > 0
