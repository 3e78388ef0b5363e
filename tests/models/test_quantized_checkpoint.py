"""Models quantised by lychee: ahead of time into a directory of their own, or as they are loaded; the same weights."""

import contextlib
import functools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lychee.kernels.quantized import dequantize
from lychee.kernels.types import Int4Weight, Int8Weight
from lychee.models import save_quantized as module
from lychee.models.config import ModelConfig
from lychee.models.files import ModelError, read_json
from lychee.models.open_checkpoint import open_checkpoint
from lychee.models.quant_format import QuantFormat, format_of
from lychee.models.quantize import quantize
from lychee.models.quantized_checkpoint import QuantizedCheckpoint
from lychee.models.quantized_on_load import quantized_on_load
from lychee.models.safetensors_io import INDEX, SINGLE, Checkpoint, read_header
from lychee.models.safetensors_writer import SafetensorsWriter
from lychee.models.save_quantized import save_quantized, stored_parts
from lychee.models.tokenizer_files import load_tokenizer
from lychee.models.weights import expected_shapes
from tests.factory import make_model_dir

SMALL = {"vocab": 384, "hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 128}
INT8, INT4 = QuantFormat.parse("int8"), QuantFormat.parse("int4")
FORMATS = [QuantFormat.parse(n) for n in ("int8", "int8-g32", "int4-g32-min", "int4-g64-zero", "int4-g32-sym")]
IDS = [fmt.name for fmt in FORMATS]
Q, HEAD, EMBEDDING = "model.layers.0.self_attn.q_proj.weight", "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {tie: make_model_dir(root / str(tie), **SMALL, tie=tie, dtype=torch.float16) for tie in (True, False)}


@pytest.fixture
def quantized(models, tmp_path):
    save_quantized(models[True], tmp_path / "q", INT4)
    return tmp_path / "q"


def opened(path):
    return open_checkpoint(path, read_json(path / "config.json"))


def read(source):
    return dict(source.read(list(source.entries)))


def assert_same(left, right):
    assert type(left) is type(right)
    for one, other in zip(
        *(vars(w).values() if not isinstance(w, torch.Tensor) else [w] for w in (left, right)), strict=True
    ):
        assert (one is None and other is None) or (one.dtype == other.dtype and torch.equal(one, other))


def rewrite(path, **changes):
    tensors = load_file(path / SINGLE) | changes
    save_file({name: t.contiguous() for name, t in tensors.items() if t is not None}, path / SINGLE)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
def test_a_written_model_is_read_as_it_would_be_quantised_on_load(models, tmp_path, fmt, tie):
    written = save_quantized(models[tie], tmp_path / "q", fmt)
    source, floats = opened(tmp_path / "q"), Checkpoint.open(models[tie])
    on_load = quantized_on_load(floats, fmt, tie)
    assert isinstance(source, QuantizedCheckpoint)
    assert source.fmt == fmt
    assert {n: (e.dtype, e.shape) for n, e in source.entries.items()} == {
        n: (e.dtype, e.shape) for n, e in on_load.entries.items()
    }
    ours, theirs, dense = read(source), read(on_load), read(floats)
    assert ours.keys() == theirs.keys() == dense.keys()
    for name, weight in ours.items():
        assert_same(weight, theirs[name])
        own = format_of(name, fmt, tie)
        if own is None:
            assert torch.equal(weight, dense[name])
        else:
            assert source.entries[name].dtype == own.name
            assert isinstance(weight, Int8Weight if own.bits == 8 else Int4Weight)
            torch.testing.assert_close(dequantize(weight), dense[name].float(), rtol=0, atol=0.3)
    assert {w.name for w in written} == ours.keys()
    assert {w.name for w in written if w.error is not None} == {n for n in ours if format_of(n, fmt, tie)}


def test_what_was_written_says_so(models, tmp_path):
    written = save_quantized(models[True], tmp_path / "q", INT4)
    values = read_json(tmp_path / "q" / "config.json")
    assert values.pop("quantization_config") == {"quant_method": "lychee", "format": "int4-g32-min"}
    assert values == read_json(models[True] / "config.json")
    assert load_tokenizer(tmp_path / "q").size == load_tokenizer(models[True]).size
    stored = sum(file.stat().st_size for file in (tmp_path / "q").glob("*.safetensors"))
    assert sum(w.bytes_after for w in written) == pytest.approx(stored, rel=0.1)
    up = next(w for w in written if w.name == "model.layers.1.mlp.up_proj.weight")
    assert (up.bytes_before, up.bytes_after) == (128 * 64 * 2, 128 * 64 // 2 + 128 * 2 * 2 * 2)
    assert 0.03 < up.error < 0.12
    assert next(w for w in written if w.name == EMBEDDING).error < 0.02


def test_shards_have_an_index_and_hold_the_same(models, tmp_path):
    save_quantized(models[True], tmp_path / "one", INT8)
    save_quantized(models[True], tmp_path / "many", INT8, shard_bytes=30_000)
    assert (tmp_path / "many" / INDEX).is_file()
    assert not (tmp_path / "many" / SINGLE).exists()
    shards = sorted(p.name for p in (tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    one, many = read(opened(tmp_path / "one")), read(opened(tmp_path / "many"))
    assert one.keys() == many.keys()
    for name, weight in one.items():
        assert_same(weight, many[name])


def test_files_of_odd_sizes_are_read_by_others(tmp_path):
    writer = SafetensorsWriter(tmp_path)
    tensors = {
        "a": torch.arange(7, dtype=torch.int8),
        "b": torch.arange(3).half(),
        "c": torch.tensor(2.5),
        "d": torch.zeros(0, 4, dtype=torch.uint8),
        "e": torch.arange(5, dtype=torch.bfloat16).float()[::2],
        "f": torch.ones(1, dtype=torch.float64),
    }
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [SINGLE]
    assert read_header(tmp_path / SINGLE).keys() == tensors.keys()
    for name, tensor in load_file(tmp_path / SINGLE).items():
        assert_same(tensor, tensors[name].contiguous())


def test_a_head_saved_beside_a_tied_embedding_is_written_once(models, tmp_path):
    path = make_model_dir(tmp_path / "m", **SMALL)
    embedding = load_file(path / SINGLE)[EMBEDDING]
    rewrite(path, **{HEAD: embedding.clone()})
    save_quantized(path, tmp_path / "q", INT4)
    assert HEAD not in opened(tmp_path / "q").entries
    assert read(quantized_on_load(Checkpoint.open(path), INT4, tied=True)).keys() >= {HEAD, EMBEDDING}
    rewrite(path, **{HEAD: embedding + 1})
    with pytest.raises(ModelError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        save_quantized(path, tmp_path / "q2", INT4)


# What is refused, leaving nothing behind


def listing(path):
    return sorted(p.name for p in path.iterdir())


def test_a_directory_that_holds_anything_is_refused(models, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "empty").mkdir()
    for place in ("full", "full/x", "nowhere/q"):
        with pytest.raises(ModelError, match=r"must be absent or an empty directory|it would be in does not exist"):
            save_quantized(models[True], tmp_path / place, INT8)
    save_quantized(models[True], tmp_path / "empty", INT8)
    assert isinstance(opened(tmp_path / "empty"), QuantizedCheckpoint)
    with pytest.raises(ModelError, match="must be absent or an empty directory"):
        save_quantized(models[True], tmp_path / "empty", INT8)
    assert listing(tmp_path) == ["empty", "full"]


def test_sources_that_are_no_models_of_floats_are_refused(models, quantized, tmp_path):
    with pytest.raises(ModelError, match=r"config\.json has a quantization_config, must be of a model that has none"):
        save_quantized(quantized, tmp_path / "again", INT8)
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        save_quantized(tmp_path / "nowhere", tmp_path / "again", INT8)
    path = make_model_dir(tmp_path / "m", **SMALL)
    rewrite(path, **{Q: torch.ones(64, 64, dtype=torch.int8)})
    with pytest.raises(ModelError, match=r"q_proj\.weight has dtype I8, must be F32 or F16 or BF16"):
        save_quantized(path, tmp_path / "again", INT8)
    rewrite(path, **{Q: None})
    with pytest.raises(ModelError, match=rf"lacks the tensors {Q}"):
        save_quantized(path, tmp_path / "again", INT8)
    assert listing(tmp_path) == ["m", "q"]


def test_weights_that_do_not_fit_or_are_not_finite_are_named(models, tmp_path):
    with pytest.raises(
        ModelError, match=r"_proj\.weight has 64 in_features, int4-g128-sym needs a multiple of 128; int4"
    ):
        save_quantized(models[True], tmp_path / "q", QuantFormat.parse("int4-g128-sym"))
    path = make_model_dir(tmp_path / "m", **SMALL)
    bad = load_file(path / SINGLE)[Q]
    bad[3, 3] = float("inf")
    rewrite(path, **{Q: bad})
    with pytest.raises(ModelError, match=rf"model\.safetensors: {Q} has the weight inf"):
        save_quantized(path, tmp_path / "q", INT8)
    with pytest.raises(ModelError, match=rf"model\.safetensors: {Q} has the weight inf"):
        read(quantized_on_load(Checkpoint.open(path), INT8, tied=True))
    assert listing(tmp_path) == ["m"]


def test_an_interrupted_write_leaves_nothing_behind(models, tmp_path, monkeypatch):
    def stop(*_):
        assert [p for p in tmp_path.iterdir() if p.name.startswith(".q.")]
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_write_companions", stop)
    with pytest.raises(KeyboardInterrupt):
        save_quantized(models[True], tmp_path / "q", INT8)
    assert listing(tmp_path) == []


def test_a_model_quantised_otherwise_cannot_be_quantised_on_load(quantized):
    source = opened(quantized)
    assert quantized_on_load(source, INT4, tied=True) is source
    with pytest.raises(
        ModelError, match=r"embed_tokens\.weight is int8, must be F32 or F16 or BF16 to be quantised to int8-g32"
    ):
        quantized_on_load(source, QuantFormat.parse("int8-g32"), tied=True)


def test_shapes_that_do_not_fit_are_refused_before_anything_is_read(tmp_path):
    save_file({Q: torch.ones(4)}, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=r"q_proj\.weight has shape \[4\], must be a matrix"):
        quantized_on_load(Checkpoint.open(tmp_path), INT8, tied=True)
    save_file({Q: torch.ones(4, 48)}, tmp_path / SINGLE)
    with pytest.raises(
        ModelError, match=r"q_proj\.weight has 48 in_features, int4-g32-min needs a multiple of 32; int8 w"
    ):
        quantized_on_load(Checkpoint.open(tmp_path), INT4, tied=True)


K = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{K}.scales": None}, rf"{K} has the parts minimums, packed, int4-g32-min has minimums, packed, scales"),
        ({f"{K}.minimums": None}, rf"{K} has the parts packed, scales, int4-g32-min has minimums, packed, scales"),
        ({f"{K}.packed": None}, rf"{K} has the parts minimums, scales, int4-g32-min has"),
        ({f"{K}.values": torch.ones(32, 64, dtype=torch.int8)}, rf"{K} has the parts .*values, int4-g32-min has"),
        (
            {f"{EMBEDDING}.minimums": torch.ones(384, 1).half()},
            rf"{EMBEDDING} has the parts .*, int8 has scales, values",
        ),
        ({K: torch.ones(32, 64)}, rf"{K} is stored both as it is and in the parts"),
        (
            {"model.norm.weight.values": torch.ones(4)},
            r"model\.norm\.weight is stored in the parts values, must be a tens",
        ),
        ({f"{K}.packed": torch.ones(32, 32).half()}, rf"{K}\.packed is F16 \[32, 32\], must be a matrix of U8"),
        ({f"{K}.packed": torch.ones(1024, dtype=torch.uint8)}, rf"{K}\.packed is U8 \[1024\], must be a matrix of U8"),
        ({f"{K}.packed": torch.ones(0, 32, dtype=torch.uint8)}, rf"{K}\.packed is U8 \[0, 32\], must be"),
        ({f"{K}.packed": torch.ones(32, 24, dtype=torch.uint8)}, rf"{K} has 48 in_features, int4-g32-min needs"),
        ({f"{K}.packed": torch.ones(32, 64, dtype=torch.uint8)}, rf"{K}\.\w+ is F16 \[32, 2\], must be .* \[32, 4\]"),
        ({f"{K}.scales": torch.ones(32, 1).half()}, rf"{K}\.\w+ is F16 \[32, 1\], must be F16 or F32 \[32, 2\]"),
        (
            {f"{K}.scales": torch.ones(32, 2)},
            rf"{K}\.minimums is F16 \[32, 2\], must be .* of one dtype with the scales",
        ),
        ({f"{K}.scales": torch.ones(32, 2).bfloat16()}, rf"{K}\.\w+ is \w+ \[32, 2\], must be F16 or F32"),
    ],
)
def test_parts_are_checked_before_anything_is_read(quantized, changes, message, monkeypatch):
    rewrite(quantized, **changes)
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("a tensor was read before the parts were checked"))
    with pytest.raises(ModelError, match=message):
        opened(quantized)


def test_a_projection_of_floats_is_refused(quantized):
    rewrite(quantized, **{f"{K}.{part}": None for part in ("packed", "scales", "minimums")}, **{K: torch.ones(32, 64)})
    with pytest.raises(ModelError, match=rf"{K} must be stored as int4-g32-min, which config\.json says"):
        opened(quantized)


def test_another_format_than_the_config_says_is_refused(quantized):
    values = read_json(quantized / "config.json")
    for name in ("int8", "int8-g32", "int4-g32-sym", "int4-g64-min"):
        values["quantization_config"]["format"] = name
        with pytest.raises(ModelError, match=rf"has the parts .*, {name} has|\.\w+ is F16 .*, must be F16 or F32"):
            open_checkpoint(quantized, values)


@pytest.mark.parametrize("part", ["scales", "minimums"])
def test_scales_that_are_not_finite_are_refused(quantized, part):
    bad = torch.ones(32, 2).half()
    bad[1, 1] = float("nan")
    rewrite(quantized, **{f"{K}.{part}": bad})
    with pytest.raises(ModelError, match=rf"{K}\.{part} must be finite"):
        read(opened(quantized))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "lychee"}, r"quantization_config\.format is 'None', must be a string"),
        ({"quant_method": "lychee", "format": 4}, r"format is '4', must be a string"),
        ({"quant_method": "lychee", "format": "int5"}, r"quantisation format is 'int5', must be int8"),
        ({"quant_method": "lychee", "format": "int8", "bits": 4}, r"has bits, may have quant_method and format"),
    ],
)
def test_settings_are_checked(quantized, settings, message):
    with pytest.raises(ModelError, match=message):
        open_checkpoint(quantized, {"quantization_config": settings})


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_damaged_parts_are_refused_or_read_but_never_crash(tmp_path_factory, data):
    path, fmt = tmp_path_factory.mktemp("fuzz"), data.draw(st.sampled_from(FORMATS))
    tensors = dict(small_tensors(fmt))
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(tensors)))
        match data.draw(st.sampled_from(["drop", "add", "flat", "shape", "dtype", "format"])):
            case "drop":
                if len(tensors) > 1:
                    del tensors[name]
            case "add":
                part = data.draw(st.sampled_from(["values", "packed", "scales", "minimums", "weight", "values.scales"]))
                tensors[f"{name.rpartition('.')[0]}.{part}"] = torch.zeros(
                    data.draw(st.sampled_from([(), (0,), (8, 2)]))
                )
            case "flat":
                tensors[name] = tensors[name].flatten()
            case "shape":
                rows, columns = data.draw(st.integers(0, 70)), data.draw(st.integers(0, 70))
                tensors[name] = torch.zeros(rows, columns, dtype=tensors[name].dtype)
            case "dtype":
                kind = data.draw(st.sampled_from([torch.int8, torch.uint8, torch.float32, torch.float16, torch.bool]))
                tensors[name] = tensors[name].to(kind)
            case "format":
                fmt = data.draw(st.sampled_from(FORMATS))
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / SINGLE)
    with contextlib.suppress(ModelError):
        source = open_checkpoint(path, {"quantization_config": {"quant_method": "lychee", "format": fmt.name}})
        for name, made in source.read(list(source.entries)):
            if not isinstance(made, torch.Tensor):
                assert dequantize(made).shape == source.entries[name].shape


@functools.cache
def small_tensors(fmt):
    """One projection of 64 in_features and 8 out_features, and a head."""
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    tensors = {f"{Q}.{part}": t for part, t in stored_parts(quantize(weight, fmt)).items()}
    tensors |= {f"{HEAD}.{part}": t for part, t in stored_parts(quantize(weight, INT8)).items()}
    return tensors | {"model.norm.weight": torch.ones(64)}


def test_the_config_asks_for_what_was_written(quantized):
    values = read_json(quantized / "config.json")
    del values["quantization_config"]
    (quantized / "config.json").write_text(json.dumps(values))
    shapes = expected_shapes(ModelConfig.load(quantized))
    source = open_checkpoint(quantized, {"quantization_config": {"quant_method": "lychee", "format": "int4"}})
    assert {name: entry.shape for name, entry in source.entries.items()} == shapes
