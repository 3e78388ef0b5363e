"""GPTQ and AWQ checkpoints: the very values their writers meant, and a sentence for what cannot be had."""

import contextlib
import functools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lychee import demo
from lychee.kernels.quantized import dequantize
from lychee.kernels.types import Int4Weight, Int8Weight
from lychee.models.config import ModelConfig
from lychee.models.files import ModelError, read_json
from lychee.models.gptq import GPTQLayout, mean_offset
from lychee.models.open_checkpoint import open_checkpoint
from lychee.models.safetensors_io import SINGLE, Checkpoint
from lychee.models.weights import expected_shapes
from tests.factory import make_model_dir
from tests.models.packers import awq_packer, gptq_packer, repack

SMALL = {"vocab": 32, "hidden": 128, "layers": 1, "heads": 4, "kv_heads": 2, "intermediate": 256, "tokenizer": None}
Q = "model.layers.0.self_attn.q_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def opened(path):
    return open_checkpoint(path, read_json(path / "config.json"))


def as_floats(path):
    source = opened(path)
    read = dict(source.read(list(source.entries)))
    return {n: t.float() if isinstance(t, torch.Tensor) else dequantize(t) for n, t in read.items()}, read


def configure(path, **changes):
    values = read_json(path / "config.json")
    values["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(values))


def rewrite(path, **changes):
    tensors = load_file(path / SINGLE) | {name.replace("__", "."): t for name, t in changes.items()}
    save_file({name: t.contiguous() for name, t in tensors.items() if t is not None}, path / SINGLE)


@pytest.fixture
def gptq(tmp_path):
    path = make_model_dir(tmp_path / "gptq", **SMALL, dtype=torch.float16)
    repack(path, GPTQ, gptq_packer(4, 32, sym=False, version="gptq"))
    return path


@pytest.fixture
def awq(tmp_path):
    path = make_model_dir(tmp_path / "awq", **SMALL, dtype=torch.float16)
    repack(path, AWQ, awq_packer(32))
    return path


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_gptq_of_4_bits_has_the_values_its_writer_meant(tmp_path, version, sym, group_size):
    path = make_model_dir(tmp_path / "m", **SMALL, dtype=torch.float16)
    said = GPTQ | {"group_size": group_size, "sym": sym, "checkpoint_format": version}
    meant = repack(path, said, gptq_packer(4, group_size, sym, version))
    floats, read = as_floats(path)
    assert floats.keys() == meant.keys()
    for name, weight in meant.items():
        torch.testing.assert_close(floats[name].double(), weight.double(), rtol=1e-6, atol=1e-7)
    q = read[f"{Q}.weight"]
    assert isinstance(q, Int4Weight)
    assert q.scales.shape[1] == 128 // (128 if group_size == -1 else group_size)
    assert (q.minimums is None) == sym
    if not sym:  # exactly -scale * zero
        zeros = -q.minimums.double() / q.scales.double()
        assert torch.equal(zeros, zeros.round())


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_gptq_of_8_bits_has_the_values_its_writer_meant(tmp_path, version, group_size):
    path = make_model_dir(tmp_path / "m", **SMALL, dtype=torch.float16)
    said = GPTQ | {"bits": 8, "group_size": group_size, "sym": True, "checkpoint_format": version}
    meant = repack(path, said, gptq_packer(8, group_size, True, version))
    floats, read = as_floats(path)
    for name, weight in meant.items():
        torch.testing.assert_close(floats[name].double(), weight.double(), rtol=1e-6, atol=1e-7)
    assert isinstance(read[f"{Q}.weight"], Int8Weight)
    assert read[f"{Q}.weight"].scales.shape[1] == (1 if group_size in (-1, 128) else 4)
    assert read["model.layers.0.mlp.down_proj.weight"].scales.shape[1] == (1 if group_size == -1 else 8)


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_awq_has_the_values_its_writer_meant(tmp_path, group_size):
    path = make_model_dir(tmp_path / "m", **SMALL, dtype=torch.float16)
    meant = repack(path, AWQ | {"group_size": group_size}, awq_packer(group_size))
    floats, read = as_floats(path)
    assert floats.keys() == meant.keys()
    for name, weight in meant.items():
        torch.testing.assert_close(floats[name].double(), weight.double(), rtol=1e-6, atol=1e-7)
    assert read[f"{Q}.weight"].scales.shape[1] == 128 // (128 if group_size == -1 else group_size)


def test_logical_entries_are_what_the_config_asks_for(gptq, awq):
    for path in (gptq, awq):
        entries = opened(path).entries
        values = {k: v for k, v in read_json(path / "config.json").items() if k != "quantization_config"}
        assert {name: entry.shape for name, entry in entries.items()} == expected_shapes(ModelConfig.parse(values))
    assert opened(gptq).entries[f"{Q}.weight"].dtype == "gptq-int4"
    assert opened(awq).entries[f"{Q}.weight"].dtype == "awq-int4"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_of_other_floats_are_kept_as_float32(gptq, dtype):
    tensors = load_file(gptq / SINGLE)
    rewrite(gptq, **{f"{Q}.scales": tensors[f"{Q}.scales"].to(dtype)})
    _, read = as_floats(gptq)
    assert torch.equal(read[f"{Q}.weight"].scales.T, tensors[f"{Q}.scales"].to(dtype).float())


# g_idx


def test_a_g_idx_may_be_missing_or_all_zeros(gptq):
    before, _ = as_floats(gptq)
    g_idx = load_file(gptq / SINGLE)[f"{Q}.g_idx"]
    rewrite(gptq, **{f"{Q}.g_idx": torch.zeros_like(g_idx)})
    assert torch.equal(as_floats(gptq)[0][f"{Q}.weight"], before[f"{Q}.weight"])
    rewrite(gptq, **{f"{Q}.g_idx": None})
    assert torch.equal(as_floats(gptq)[0][f"{Q}.weight"], before[f"{Q}.weight"])


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_in_another_order_are_represented(tmp_path, bits):
    path = make_model_dir(tmp_path / "m", **SMALL, dtype=torch.float16)
    blocks = [np.random.default_rng(0).permutation(n) for n in (2, 4)]
    said = GPTQ | {"bits": bits, "group_size": 64, "desc_act": True, "sym": True}
    order = lambda n: np.repeat(blocks[n == 256], 64)  # noqa: E731
    meant = repack(path, said, gptq_packer(bits, 64, sym=True, version="gptq", order=order))
    floats, _ = as_floats(path)
    for name, weight in meant.items():
        torch.testing.assert_close(floats[name].double(), weight.double(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_whose_groups_are_mixed_is_refused(tmp_path, bits):
    path = make_model_dir(tmp_path / "m", **SMALL, dtype=torch.float16)
    order = lambda n: np.random.default_rng(n).permutation(np.arange(n) // 32)  # noqa: E731
    repack(path, GPTQ | {"bits": bits, "desc_act": True}, gptq_packer(bits, 32, True, "gptq", order))
    with pytest.raises(ModelError, match=r"_proj\.g_idx puts in_features of several groups side by side \(desc_act\)"):
        as_floats(path)


@pytest.mark.parametrize("value", [-1, 4, 1 << 30])
def test_a_g_idx_out_of_range_is_refused(gptq, value):
    g_idx = load_file(gptq / SINGLE)[f"{Q}.g_idx"]
    g_idx[7] = value
    rewrite(gptq, **{f"{Q}.g_idx": g_idx})
    with pytest.raises(ModelError, match=r"q_proj\.g_idx must be from 0 to 3"):
        as_floats(gptq)


# zero-point conventions


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function that packs the packaged model's trained weights by a convention, and says another of them."""
    root = tmp_path_factory.mktemp("trained")
    made = {}

    def packed(written, said, sym, group_size=32):
        if (path := root / f"{written}-{sym}-{group_size}") not in made:
            path.mkdir()
            weights = load_file(f"{demo.TARGET}/model.safetensors")
            save_file({n: w for n, w in weights.items() if ".layers." not in n or ".layers.0." in n}, path / SINGLE)
            (path / "config.json").write_text("{}")
            repack(path, {}, gptq_packer(4, group_size, sym, written))
            made[path] = True
        settings = GPTQ | {"sym": sym, "group_size": group_size, "checkpoint_format": said}
        (path / "config.json").write_text(json.dumps({"quantization_config": settings}))
        return path

    return packed


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("group_size", [32, 96])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_a_wrong_convention_is_found_by_the_weights(trained, sym, version, group_size):
    right = opened(trained(version, version, sym, group_size))
    assert abs(mean_offset(right, right.layout)) < 0.1
    other = "gptq_v2" if version == "gptq" else "gptq"
    with pytest.raises(
        ModelError, match=rf"checkpoint_format is {other}, .* 1\.0 steps from 0: .* stored as {version}"
    ):
        opened(trained(version, other, sym, group_size))


def test_gptq_is_the_convention_of_files_that_do_not_say(gptq, tmp_path):
    opened(gptq)
    path = make_model_dir(tmp_path / "v2", **SMALL, dtype=torch.float16)
    repack(path, GPTQ, gptq_packer(4, 32, False, "gptq_v2"))
    with pytest.raises(ModelError, match=r"checkpoint_format is missing, so gptq, .* stored as gptq_v2"):
        opened(path)


@pytest.mark.parametrize(("written", "said", "zero"), [("gptq", "gptq_v2", 127), ("gptq_v2", "gptq", 129)])
def test_a_wrong_convention_of_8_bits_is_found_by_the_zeros(tmp_path, written, said, zero):
    path = make_model_dir(tmp_path / "m", **SMALL, dtype=torch.float16)
    settings = GPTQ | {"bits": 8, "sym": True, "checkpoint_format": said}
    repack(path, settings, gptq_packer(8, 32, True, written))
    with pytest.raises(ModelError, match=rf"qzeros has the zero {zero}, must be 128 for 8 bits"):
        as_floats(path)


def test_8_bits_that_are_not_symmetric_are_refused(tmp_path):
    path = make_model_dir(tmp_path / "m", **SMALL, dtype=torch.float16)
    repack(path, GPTQ | {"bits": 8}, gptq_packer(8, 32, False, "gptq"))
    with pytest.raises(ModelError, match="must be 128 for 8 bits: symmetric"):
        as_floats(path)


def test_a_zero_that_overflowed_is_refused_unless_its_writer_carried(gptq):
    """GPTQModel subtracts 0x11111111 from the int32s of "gptq_v2", so that a zero of 0 borrows from its neighbours."""
    tensors = load_file(gptq / SINGLE)
    v2 = tensors[f"{Q}.qzeros"] + 0x11111111
    v2[0, 0] = v2[0, 0] & ~0xF0  # column 1 of the first group has the zero 0
    rewrite(gptq, **{f"{Q}.qzeros": v2 - 0x11111111})
    with pytest.raises(ModelError, match=r"q_proj\.qzeros has the zero 16, must be from 0 to 15"):
        as_floats(gptq)
    configure(gptq, meta={"quantizer": ["gptqmodel:1.4.0"]})
    _, carried = as_floats(gptq)
    rewrite(gptq, **{f"{Q}.qzeros": v2})
    tensors = load_file(gptq / SINGLE)
    others = {n: t + 0x11111111 for n, t in tensors.items() if n.endswith("qzeros") and not n.startswith(Q)}
    rewrite(gptq, **others)
    configure(gptq, meta=None, checkpoint_format="gptq_v2")
    assert torch.equal(carried[f"{Q}.weight"].minimums, as_floats(gptq)[1][f"{Q}.weight"].minimums)
    assert carried[f"{Q}.weight"].minimums[1, 0] == 0


# biases


def test_biases_of_zeros_that_no_one_asked_for_are_left_out(gptq):
    rewrite(gptq, **{f"{Q}.bias": torch.zeros(128).half(), "model.layers.0.mlp.up_proj.bias": torch.zeros(256).half()})
    assert not [name for name in opened(gptq).entries if name.endswith("bias")]
    values = read_json(gptq / "config.json")
    kept = open_checkpoint(gptq, values | {"attention_bias": True}).entries
    assert [name for name in kept if name.endswith("bias")] == [f"{Q}.bias"]
    kept = open_checkpoint(gptq, values | {"model_type": "qwen2"}).entries
    assert [name for name in kept if name.endswith("bias")] == [f"{Q}.bias"]


def test_other_biases_stay(gptq):
    rewrite(gptq, **{f"{Q}.bias": torch.ones(128).half()})
    assert f"{Q}.bias" in opened(gptq).entries


# refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, r"quantization_config\.bits is 3, must be 4 or 8"),
        ({"bits": 2}, r"bits is 2, must be 4 or 8"),
        ({"bits": "4"}, r"bits is 4, must be 4 or 8"),
        ({"bits": True}, r"bits is True"),
        ({"bits": None}, r"bits is None"),
        ({"group_size": 16}, r"group_size is 16, must be -1 or a multiple of 32"),
        ({"group_size": 0}, r"group_size is 0"),
        ({"group_size": 32.0}, r"group_size is 32\.0"),
        ({"group_size": 64}, r"\.qzeros is I32 \[8, 16\], must be I32 \[4, 16\] for gptq-int4"),
        ({"group_size": 96}, r"has 256 in_features in groups of 96, must be multiples of 32"),
        ({"bits": 8}, r"down_proj\.\w+ is I32 .*, must be I32 .* for gptq-int8"),
        ({"checkpoint_format": "marlin"}, r"checkpoint_format is 'marlin', must be gptq or gptq_v2"),
        ({"checkpoint_format": ["gptq"]}, r"checkpoint_format is .* must be gptq or gptq_v2"),
        ({"checkpoint_format": "gptq", "format": "gptq_v2"}, r"one checkpoint_format and another format"),
        ({"is_marlin_format": True}, r"is_marlin_format is true"),
        (
            {"quant_method": "awq"},
            r"down_proj\.qweight is .*, must be .* for awq-int4|down_proj has a g_idx, awq-int4 has",
        ),
        ({"quant_method": "bitsandbytes"}, r"quant_method is 'bitsandbytes', must be lychee, gptq .* or awq"),
        ({"quant_method": "fp8"}, r"quant_method is 'fp8', must be"),
        ({"quant_method": ["gptq"]}, r"quant_method is .* must be"),
        ({"quant_method": None}, r"quant_method is 'None', must be"),
    ],
)
def test_gptq_settings_are_refused(gptq, changes, message):
    configure(gptq, **changes)
    with pytest.raises(ModelError, match=message):
        opened(gptq)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 8}, r"quantization_config\.bits is 8, must be 4"),
        ({"version": "gemv"}, r"version is 'gemv', must be gemm"),
        ({"version": "gemv_fast"}, r"version is 'gemv_fast', must be gemm"),
        ({"version": "marlin"}, r"version is 'marlin', must be gemm"),
        ({"zero_point": False}, r"zero_point is False, must be true"),
        ({"backend": "llm-awq"}, r"backend is 'llm-awq', must be autoawq"),
        ({"group_size": 48}, r"group_size is 48, must be -1 or a multiple of 32"),
        ({"group_size": 64}, r"\.qzeros is I32 \[8, 16\], must be I32 \[4, 16\] for awq-int4"),
        ({"quant_method": "gptq"}, r"down_proj\.qweight is I32 \[256, 16\], must be I32 \[256, 128\] for gptq-int4"),
    ],
)
def test_awq_settings_are_refused(awq, changes, message):
    configure(awq, **changes)
    with pytest.raises(ModelError, match=message):
        opened(awq)


def test_awq_settings_of_its_own_names_are_read(awq):
    configure(awq, version="GEMM", bits=None, group_size=None)
    values = read_json(awq / "config.json")
    settings = {k: v for k, v in values["quantization_config"].items() if k not in ("bits", "group_size")}
    values["quantization_config"] = settings | {"w_bit": 4, "q_group_size": 32}
    assert open_checkpoint(awq, values).layout.group_size == 32


def test_settings_that_are_no_object_are_refused(gptq):
    with pytest.raises(ModelError, match=r"quantization_config is 'gptq', must be an object or null"):
        open_checkpoint(gptq, {"quantization_config": "gptq"})


def test_a_model_without_settings_is_an_ordinary_checkpoint(tmp_path):
    path = make_model_dir(tmp_path / "m", **SMALL)
    assert isinstance(open_checkpoint(path, {}), Checkpoint)
    assert isinstance(open_checkpoint(path, {"quantization_config": None}), Checkpoint)
    with pytest.raises(ModelError, match="has no layer with a qweight"):
        open_checkpoint(path, {"quantization_config": GPTQ})


def test_scales_that_are_not_finite_are_refused(gptq):
    scales = load_file(gptq / SINGLE)[f"{Q}.scales"]
    scales[1, 1] = float("nan")
    rewrite(gptq, **{f"{Q}.scales": scales})
    with pytest.raises(ModelError, match=r"q_proj\.scales must be finite"):
        as_floats(gptq)


def test_a_layer_stored_twice_is_refused(gptq):
    rewrite(gptq, **{f"{Q}.weight": torch.zeros(128, 128).half()})
    with pytest.raises(ModelError, match=r"q_proj\.weight is stored both as it is and as g_idx, qweight, qzeros"):
        opened(gptq)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_damaged_layers_are_refused_or_read_but_never_crash(tmp_path_factory, data):
    """Parts dropped, added, reshaped, of other dtypes and of other numbers, under settings that may not be theirs."""
    method = data.draw(st.sampled_from(["gptq", "awq"]))
    path = tmp_path_factory.mktemp("fuzz")
    tensors, values = small_tensors(method)
    tensors, values = dict(tensors), {"quantization_config": dict(values)}
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(tensors)))
        match data.draw(st.sampled_from(["drop", "add", "flat", "shape", "dtype", "numbers", "settings"])):
            case "drop":
                if len(tensors) > 1:
                    del tensors[name]
            case "add":
                part = data.draw(st.sampled_from(["weight", "bias", "g_idx", "values", "scales", "qweight", ""]))
                tensors[f"{name.rpartition('.')[0]}.{part}"] = torch.zeros(
                    data.draw(st.sampled_from([(), (0,), (32, 8)]))
                )
            case "flat":
                tensors[name] = tensors[name].flatten()
            case "shape":
                rows, columns = data.draw(st.integers(0, 70)), data.draw(st.integers(0, 70))
                tensors[name] = torch.zeros(rows, columns, dtype=tensors[name].dtype)
            case "dtype":
                kind = data.draw(st.sampled_from([torch.int8, torch.int32, torch.int64, torch.float16, torch.bool]))
                tensors[name] = tensors[name].to(kind)
            case "numbers":
                shape = tensors[name].shape
                tensors[name] = torch.randint(-(2**31), 2**31 - 1, shape).to(tensors[name].dtype)
            case "settings":
                key = data.draw(
                    st.sampled_from(["bits", "group_size", "checkpoint_format", "meta", "version", "format"])
                )
                value = st.sampled_from([-1, 0, 4, 8, 32, 64, 1 << 70, "gptq", "gptq_v2", "gemm", None, [], {}, 0.5])
                values["quantization_config"][key] = data.draw(value)
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / SINGLE)
    with contextlib.suppress(ModelError):
        source = open_checkpoint(path, values)
        for name, weight in source.read(list(source.entries)):
            if not isinstance(weight, torch.Tensor):
                assert dequantize(weight).shape == source.entries[name].shape


@functools.cache
def small_tensors(method):
    """One layer of 64 in_features and 16 out_features."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(16, 64, generator=generator) / 8
    base = "model.layers.0.mlp.up_proj"
    parts, _ = (gptq_packer(4, 32, False, "gptq") if method == "gptq" else awq_packer(32))(weight)
    tensors = {f"{base}.{part}": tensor for part, tensor in parts.items()}
    return tensors | {"model.norm.weight": torch.ones(64)}, GPTQ if method == "gptq" else AWQ


def test_layouts_are_as_small_as_their_settings():
    assert GPTQLayout.parse("c", GPTQ) == GPTQLayout(4, 32, zero_offset=1, carries=False)
    meta = {"quantizer": "gptqmodel:4.0.0"}
    assert GPTQLayout.parse("c", GPTQ | {"meta": meta}) == GPTQLayout(4, 32, zero_offset=1, carries=True)
    v2 = GPTQ | {"meta": meta, "checkpoint_format": "gptq_v2"}
    assert GPTQLayout.parse("c", v2) == GPTQLayout(4, 32, zero_offset=0, carries=False)
