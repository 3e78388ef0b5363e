"""GGUF weights: bit for bit what the gguf package makes of them, and a model that computes what its safetensors do."""

import json

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from safetensors.torch import load_file

from lychee.kernels.types import Int4Weight, Int8Weight
from lychee.models.batch import Batch
from lychee.models.files import ModelError
from lychee.models.gguf_checkpoint import GGUFCheckpoint, halves_of_pairs, hf_name
from lychee.models.gguf_file import GGUFFile
from lychee.models.kv_cache import KVCache
from lychee.models.llama import Llama
from lychee.models.model_files import open_model
from tests.factory import make_model_dir, random_weights, save_weights
from tests.models.gguf_factory import dequantised, gguf_name, paired, random_blocks, tensors, to_gguf, write

SMALL = {"vocab": 64, "hidden": 64, "heads": 2, "kv_heads": 1, "intermediate": 96, "layers": 2, "tokenizer": None}
BLOCKS = sorted(quants._type_traits, key=lambda kind: kind.name)
KEPT = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1)
QUANTISED = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model_dir(tmp_path_factory.mktemp("model"), **SMALL)


def floats(weight):
    """The meaning of a quantised weight, from its type's docstring."""
    if isinstance(weight, torch.Tensor):
        return weight
    if isinstance(weight, Int8Weight):
        values, scales = weight.values.float(), weight.scales.float()
        return (values.view(*scales.shape, -1) * scales[..., None]).flatten(1)
    packed = weight.packed.view(len(weight.packed), -1, 16)
    q = torch.cat([packed & 15, packed >> 4], -1).float()
    scales = weight.scales.float()[..., None]
    return (
        scales * q + weight.minimums.float()[..., None] if weight.minimums is not None else scales * (q - 8)
    ).flatten(1)


def one_tensor(path, kind, data, shape, name="blk.0.ffn_up.weight"):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile.open(path)
    assert file.tensors[name].shape == shape
    return GGUFCheckpoint.open(file)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_every_type_has_the_values_that_the_package_gives_it(tmp_path, kind):
    data = random_blocks(kind, 6, 512)
    checkpoint = one_tensor(tmp_path / "m.gguf", kind, data, (6, 512))
    want = dequantised(data, kind)
    ((name, got),) = checkpoint.as_floats(torch.float32).read(list(checkpoint.entries))
    assert (name, checkpoint.entries[name].dtype) == ("model.layers.0.mlp.up_proj.weight", kind.name)
    assert torch.equal(got, want)
    ((_, half),) = checkpoint.as_floats(torch.bfloat16).read([name])
    assert torch.equal(half, want.bfloat16())
    ((_, kept),) = checkpoint.read([name])
    if kind in KEPT:
        assert isinstance(kept, Int8Weight if kind is Kind.Q8_0 else Int4Weight)
        assert kept.scales.dtype == torch.float16
        assert torch.equal(floats(kept), want)
        assert checkpoint.note is None
    elif kind is Kind.BF16:
        assert kept.dtype == torch.bfloat16
        assert torch.equal(kept.float(), want)
    else:
        assert isinstance(kept, Int8Weight)
        assert kept.values.abs().max() <= 127
        error = (floats(kept) - want).view(6, -1, 32).abs()
        assert (error <= 0.505 * kept.scales.float()[..., None] + 127 * 2.0**-25).all()
        assert f"m.gguf: tensors of type {kind.name} are rounded to int8 in groups of 32" in checkpoint.note


def test_a_group_of_zeros_stays_zero(tmp_path):
    checkpoint = one_tensor(tmp_path / "m.gguf", Kind.Q6_K, np.zeros((2, 210), np.uint8), (2, 256))
    ((_, kept),) = checkpoint.read(list(checkpoint.entries))
    assert not floats(kept).any()


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.F32, torch.float32), (Kind.F16, torch.float16)])
def test_floats_stay_as_they_are(tmp_path, model, kind, dtype):
    checkpoint = GGUFCheckpoint.open(GGUFFile.open(to_gguf(tmp_path / "m.gguf", model, kind=kind)))
    want = load_file(model / "model.safetensors")
    assert set(checkpoint.entries) == set(want)
    for name, got in checkpoint.read(list(want)):
        assert torch.equal(got, want[name] if got.ndim == 1 else want[name].to(dtype))


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_quantised_rows_of_queries_and_keys_are_put_back_in_order(tmp_path, model, kind, architecture):
    path = to_gguf(tmp_path / "m.gguf", model, architecture, kind)
    checkpoint = GGUFCheckpoint.open(GGUFFile.open(path))
    want = load_file(model / "model.safetensors")
    for name, got in checkpoint.read(list(want)):
        expected = want[name]
        if expected.ndim == 2:
            expected = dequantised(quants.quantize(expected.numpy(), kind), kind)
            torch.testing.assert_close(floats(got), expected, rtol=0, atol=0.01 if kind not in KEPT else 0)
        assert torch.equal(dict(checkpoint.as_floats(torch.float32).read([name]))[name], expected)


def test_biases_of_queries_and_keys_are_put_back_too(tmp_path):
    path = make_model_dir(tmp_path / "m", **SMALL, attention_bias=True, mlp_bias=True)
    opened = open_model(to_gguf(tmp_path / "m.gguf", path))
    assert "self_attn.q_proj" in opened.config.biased
    assert "mlp.gate_proj" in opened.config.biased
    for name, want in load_file(path / "model.safetensors").items():
        assert torch.equal(dict(opened.source.read([name]))[name], want)


def logits(path, dtype=None, quant=None):
    model = Llama.load(path, dtype=dtype, quant=quant)
    kv = KVCache.allocate(model.config, 8, 8, torch.float32, "cpu")
    return model, model.forward(Batch.prefill([list(range(40))], [0], [list(range(8))], 8), kv)


@pytest.mark.parametrize("changes", [{}, {"tie": False}, {"head_dim": 16, "rope_theta": 5e5}, {"attention_bias": True}])
def test_a_model_computes_what_its_safetensors_do(tmp_path, changes):
    path = make_model_dir(tmp_path / "m", **{**SMALL, "heads": 4, "kv_heads": 2}, **changes)
    ours, got = logits(to_gguf(tmp_path / "m.gguf", path))
    theirs, want = logits(path)
    assert torch.equal(got, want)
    assert ours.config == theirs.config


@pytest.mark.parametrize(("architecture", "name"), [("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")])
def test_a_qwen_computes_what_its_safetensors_do(tmp_path, architecture, name):
    named = {"architectures": [name], "model_type": architecture}
    path = make_model_dir(tmp_path / "m", **SMALL, **named, rope_theta=1e6)
    config = json.loads((path / "config.json").read_text())
    weights = random_weights({**config, "attention_bias": architecture == "qwen2"}, 0)
    weights = {key: weight for key, weight in weights.items() if not key.endswith("o_proj.bias")}
    if architecture == "qwen3":
        norms = [f"model.layers.{i}.self_attn.{part}_norm.weight" for i in range(2) for part in "qk"]
        weights |= {key: torch.rand(config["head_dim"]) + 0.5 for key in norms}
    save_weights(path, weights)
    ours, got = logits(to_gguf(tmp_path / "m.gguf", path, architecture))
    theirs, want = logits(path)
    assert torch.equal(got, want)
    assert ours.config == theirs.config


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0, Kind.Q5_1, Kind.F16], ids=lambda kind: kind.name)
def test_a_quantised_model_computes_what_its_dequantised_weights_do(tmp_path, model, kind):
    config = json.loads((model / "config.json").read_text())
    rounded = make_model_dir(tmp_path / "rounded", **SMALL)
    weights = random_weights(config, 0)
    for name, weight in weights.items():
        if weight.ndim == 2:
            weights[name] = dequantised(quants.quantize(weight.numpy(), kind), kind)
    save_weights(rounded, weights)
    path = to_gguf(tmp_path / "m.gguf", model, kind=kind)
    want = logits(rounded)[1]
    assert torch.equal(logits(path, torch.float32, "none")[1], want)
    if kind in KEPT:  # in another order of summation
        torch.testing.assert_close(logits(path, torch.float32)[1], want, rtol=1e-4, atol=1e-4)


def test_names_that_have_no_counterpart_are_refused_as_unexpected(tmp_path, model):
    config = json.loads((model / "config.json").read_text())
    for name in ("blk.0.ffn_gate_inp.weight", "blk.00.ffn_up.weight", "token_embd_norm.weight", "output_norm.bias"):
        weights = tensors(model, config, "llama") | {name: np.ones(4, np.float32)}
        good = GGUFFile.open(to_gguf(tmp_path / "good.gguf", model))
        metadata = {key: value for key, value in good.metadata.items() if key.startswith("llama.")}
        path = write(tmp_path / "m.gguf", "llama", metadata, weights)
        with pytest.raises(ModelError, match=f"does not ask for: {hf_name(name)}"):
            Llama.load(path)


def test_a_name_comes_back_from_the_other_side():
    for name in load_names():
        assert hf_name(gguf_name(name)) == name


def load_names():
    parts = ("self_attn.q_proj.weight", "self_attn.q_proj.bias", "mlp.down_proj.weight", "input_layernorm.weight")
    return [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        *(f"model.layers.17.{p}" for p in parts),
    ]


def test_a_type_without_arithmetic_is_refused_by_name(tmp_path):
    with pytest.raises(
        ModelError, match=r"m\.gguf: tensor blk\.0\.ffn_up\.weight has type Q8_1, must be F32, F16, BF16 or"
    ):
        one_tensor(tmp_path / "m.gguf", Kind.Q8_1, np.zeros((2, 40), np.uint8), (2, 32))
    with pytest.raises(ModelError, match="has type I32"):
        one_tensor(tmp_path / "m.gguf", Kind.I32, np.zeros((2, 32), np.int32), (2, 32))


def test_rows_that_do_not_fit_the_heads_are_refused(tmp_path):
    path = tmp_path / "m.gguf"
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.weight has 3 rows, must have an even number for each of 1"):
        one_tensor(path, Kind.F32, np.ones((3, 4), np.float32), (3, 4), "blk.0.attn_q.weight")


def test_interleaving_is_its_own_inverse_of_paired():
    weight = np.arange(24).reshape(12, 2)
    assert np.array_equal(paired(weight, 3)[halves_of_pairs(12, 3)], weight)
