"""Checkpoints: every tensor accounted for, and nothing allocated for a file that does not hold what it says."""

import contextlib
import json
import shutil
import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lychee.models.config import ModelConfig
from lychee.models.files import ModelError
from lychee.models.safetensors_io import INDEX, SINGLE, Checkpoint, read_header
from lychee.models.weights import check, load_weights
from tests.factory import make_model_dir, save_weights

SMALL = {"vocab": 32, "hidden": 16, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 24, "tokenizer": None}


def load(path, dtype=torch.float32):
    return load_weights(Checkpoint.open(path), ModelConfig.load(path), dtype, "cpu")


@pytest.fixture
def model(tmp_path):
    return make_model_dir(tmp_path / "model", **SMALL)


@pytest.fixture
def sharded(tmp_path):
    return make_model_dir(tmp_path / "sharded", **SMALL, shards=3)


@pytest.fixture
def unread(monkeypatch):
    """Fails the test if any tensor is read."""
    monkeypatch.setattr(
        Checkpoint, "read", lambda *_: pytest.fail("a tensor was read before the checkpoint was checked")
    )


def rewrite(path, **changes):
    """Save the single-file checkpoint again with tensors changed, added or (None) dropped."""
    weights = {**load_file(path / SINGLE), **changes}
    save_weights(path, {name: w for name, w in weights.items() if w is not None})


def test_tensors_land_in_their_places(model):
    saved, weights = load_file(model / SINGLE), load(model)
    assert len(weights.layers) == 2
    torch.testing.assert_close(
        weights.layers[1].k.weight, saved["model.layers.1.self_attn.k_proj.weight"], rtol=0, atol=0
    )
    torch.testing.assert_close(
        weights.layers[0].down.weight, saved["model.layers.0.mlp.down_proj.weight"], rtol=0, atol=0
    )
    assert weights.layers[0].q.bias is None
    assert weights.lm_head is weights.embed


def test_shards_load_as_the_single_file_does(model, sharded):
    ours, theirs = load(sharded), load(model)
    torch.testing.assert_close(ours.layers[1].up.weight, theirs.layers[1].up.weight, rtol=0, atol=0)
    torch.testing.assert_close(ours.embed, theirs.embed, rtol=0, atol=0)


@pytest.mark.parametrize("saved", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_are_converted_to_the_dtype_asked_for(tmp_path, saved, wanted):
    path = make_model_dir(tmp_path / "m", **SMALL, dtype=saved)
    embed = load(path, wanted).embed
    torch.testing.assert_close(embed, load_file(path / SINGLE)["model.embed_tokens.weight"].to(wanted), rtol=0, atol=0)


def test_weights_outlive_their_file(model):
    weights = load(model)
    before = weights.embed.clone()
    with open(model / SINGLE, "r+b") as file:
        file.write(b"\0" * (model / SINGLE).stat().st_size)
    torch.testing.assert_close(weights.embed, before, rtol=0, atol=0)


def test_a_separate_head_is_used_when_the_config_does_not_tie(tmp_path):
    weights = load(make_model_dir(tmp_path / "m", **SMALL, tie=False))
    assert not torch.equal(weights.lm_head, weights.embed)


def test_a_tied_head_saved_again_must_be_the_embedding(model):
    embed = load_file(model / SINGLE)["model.embed_tokens.weight"]
    rewrite(model, **{"lm_head.weight": embed.clone()})
    assert load(model).lm_head.shape == embed.shape
    rewrite(model, **{"lm_head.weight": embed + 1})
    with pytest.raises(ModelError, match=r"model\.safetensors: lm_head\.weight differs from model\.embed_tokens"):
        load(model)


def test_well_known_buffers_are_ignored(model):
    rewrite(
        model,
        **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "model.rotary_emb.inv_freq": torch.ones(4)},
    )
    load(model)


K1 = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({K1: None}, f"lacks the tensors {K1}"),
        ({"model.norm.weight": None, K1: None}, f"lacks the tensors {K1}, model.norm.weight"),
        ({"extra.weight": torch.ones(2)}, r"model\.safetensors has tensors that the config does not ask for: extra"),
        ({"model.layers.0.mlp.up_proj.bias": torch.ones(24)}, "does not ask for: model.layers.0.mlp.up_proj.bias"),
        ({K1: torch.ones(8, 15)}, rf"model\.safetensors: {K1} has shape \[8, 15\], must be \[8, 16\]"),
        ({K1: torch.ones(16, 8)}, rf"{K1} has shape \[16, 8\], must be \[8, 16\]"),
        ({K1: torch.ones(8, 16, dtype=torch.int8)}, rf"{K1} has dtype I8, must be F32 or F16 or BF16"),
        ({K1: torch.ones(8, 16, dtype=torch.float64)}, rf"{K1} has dtype F64, must be"),
        ({"lm_head.weight": torch.ones(31, 16)}, r"lm_head.weight has shape \[31, 16\], must be \[32, 16\]"),
    ],
)
def test_wrong_tensors_are_named_before_anything_is_read(model, changes, message):
    rewrite(model, **changes)
    with pytest.raises(ModelError, match=message):
        load(model)


@pytest.mark.usefixtures("unread")
def test_many_missing_tensors_are_counted(model):
    weights = load_file(model / SINGLE)
    save_weights(model, {n: w for n, w in weights.items() if "layers.1" not in n})
    with pytest.raises(ModelError, match=r"lacks the tensors model\.layers\.1\.input_layernorm\.weight, .* and 4 more"):
        load(model)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
def test_biases_that_the_config_asks_for_are_needed(model, key):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, key: True}))
    with pytest.raises(ModelError, match=r"lacks the tensors .*_proj\.bias"):
        load(model)


@pytest.mark.usefixtures("unread")
def test_a_missing_shard_is_named_with_its_tensors(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00003\.safetensors, which should hold .* and \d more"):
        load(sharded)


@pytest.mark.usefixtures("unread")
def test_a_shard_without_a_tensor_that_the_index_promises_is_named(sharded):
    file = sharded / "model-00001-of-00003.safetensors"
    weights = load_file(file)
    lost = weights.popitem()[0]
    save_file(weights, file)
    with pytest.raises(ModelError, match=rf"model-00001-of-00003\.safetensors lacks {lost}, which {INDEX} says"):
        load(sharded)


@pytest.mark.usefixtures("unread")
def test_a_tensor_in_two_shards_is_refused(sharded):
    first, second = (sharded / f"model-0000{i}-of-00003.safetensors" for i in (1, 2))
    name, tensor = load_file(first).popitem()
    save_file({**load_file(second), name: tensor}, second)
    with pytest.raises(ModelError, match=f"{name} is in both"):
        load(sharded)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "weights.bin", ""])
def test_an_index_may_only_name_safetensors_files_beside_it(sharded, shard):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"][K1] = shard
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"must be a \.safetensors file beside it"):
        load(sharded)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}])
def test_an_index_without_a_map_is_refused(sharded, weight_map):
    (sharded / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match="weight_map must map tensor names to file names"):
        load(sharded)


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_unread(model, pickle):
    (model / SINGLE).rename(model / pickle)
    with pytest.raises(ModelError, match=f"holds {pickle}; pickles can run code, only safetensors are read"):
        load(model)


def test_a_git_lfs_pointer_is_named_as_one(model):
    (model / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(ModelError, match="is a Git LFS pointer"):
        load(model)


def test_a_directory_without_weights_is_refused(model):
    (model / SINGLE).unlink()
    with pytest.raises(ModelError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        load(model)
    config = ModelConfig.load(model)
    shutil.rmtree(model)
    with pytest.raises(ModelError, match="is not a model directory"):
        load_weights(Checkpoint.open(model), config, torch.float32, "cpu")


def test_code_beside_a_checkpoint_is_never_run(model, tmp_path):
    config = json.loads((model / "config.json").read_text())
    code = {"AutoModelForCausalLM": "modeling.Evil", "AutoConfig": "modeling.Evil"}
    (model / "config.json").write_text(json.dumps({**config, "auto_map": code}))
    (model / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    load(model)
    assert not (tmp_path / "ran").exists()


def header(**tensors):
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


F32_4 = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "says its header has 0 bytes"),
        (b"\1\2\3", "may have 0 in a file of 3"),
        (struct.pack("<Q", 2**63), "says its header has 9223372036854775808 bytes, may have 0 in a file of 8"),
        (struct.pack("<Q", 100) + b"{}", "says its header has 100 bytes, may have 2 in a file of 10"),
        (struct.pack("<Q", 2) + b"[]", "holds a list"),
        (struct.pack("<Q", 2) + b"{x", "is not JSON"),
        (struct.pack("<Q", 2) + b"\xff\xff", "is not JSON"),
        (header(w=3), "w has dtype None"),
        (header(w={**F32_4, "dtype": "F33"}), "w has dtype F33, must be one of"),
        (header(w={**F32_4, "shape": [-4]}), r"w has shape \[-4\], must be a list of sizes"),
        (header(w={**F32_4, "shape": [True]}), r"w has shape \[True\]"),
        (header(w={**F32_4, "data_offsets": [0]}), r"w has data_offsets \[0\], must be \[start, end\]"),
        (header(w={**F32_4, "data_offsets": [16, 0]}), "w is given -16 bytes"),
        (header(w={**F32_4, "shape": [5]}), r"w is given 16 bytes, its F32 \[5\] needs 20"),
        (header(w={**F32_4, "shape": [1 << 40]}), "needs 4398046511104"),
        (header(w=F32_4), "has 0 bytes of data, its header describes 16"),
        (header(w=F32_4) + b"\0" * 15, "has 15 bytes of data, its header describes 16"),
        (header(w=F32_4) + b"\0" * 17, "has 17 bytes of data, its header describes 16"),
        (header(w=F32_4, v=F32_4) + b"\0" * 32, "w starts at byte 0, must start at 16"),
        (header(w={**F32_4, "data_offsets": [16, 32]}) + b"\0" * 32, "w starts at byte 16, must start at 0"),
        (struct.pack("<Q", 13) + b'{"w":1,"w":2}', "gives 'w' twice"),
    ],
)
def test_headers_are_checked_against_the_file(tmp_path, content, message):
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_header(tmp_path / SINGLE)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_loads_but_never_crashes(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz")
    make_model_dir(path, **SMALL)
    content = bytearray((path / SINGLE).read_bytes())
    length = int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 8 + length - 1) | st.integers(8, 200))
        content[at] = data.draw(st.integers(0, 255) | st.sampled_from(list(b'0123456789"{}[]:,')))
    cut = data.draw(st.sampled_from([len(content)] * 3 + [7, 8, length // 2, len(content) - 1]))
    (path / SINGLE).write_bytes(content[:cut])
    with contextlib.suppress(ModelError):
        load(path)


def test_a_quantised_norm_is_refused(model):
    """Of whatever source: only matrices have ops for it."""
    opened, config = Checkpoint.open(model), ModelConfig.load(model)
    norm = "model.layers.0.input_layernorm.weight"
    entries = {**opened.entries, norm: replace(opened.entries[norm], dtype="int8")}
    with pytest.raises(ModelError, match=rf"{norm} has dtype int8, must be F32 or F16 or BF16"):
        check(replace(opened, entries=entries), config)
