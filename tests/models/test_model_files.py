"""What a path may name: a directory of Hugging Face's, a GGUF file, a directory with one."""

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind

from lychee import LLM, SamplingParams, run
from lychee.kernels.types import Int4Weight, Int8Weight
from lychee.models.files import ModelError
from lychee.models.gguf_checkpoint import GGUFCheckpoint, GGUFFloats
from lychee.models.llama import Llama
from lychee.models.model_files import gguf_path, is_model, open_model
from lychee.models.safetensors_io import Checkpoint
from lychee.models.tokenizer_files import load_tokenizer
from lychee.runtime.checks import ParameterError
from tests.factory import make_model_dir
from tests.models.gguf_factory import to_gguf


@pytest.fixture
def both(tmp_path):
    """A model's directory, and another that holds its GGUF."""
    model = make_model_dir(tmp_path / "hf", layers=1)
    (tmp_path / "gguf").mkdir()
    return model, to_gguf(tmp_path / "gguf" / "m.gguf", model)


def test_paths_of_a_model(both, tmp_path):
    model, file = both
    assert gguf_path(file) == file
    assert gguf_path(file.parent) == file
    assert gguf_path(model) is None
    assert gguf_path(tmp_path / "nowhere") is None
    assert all(is_model(path) for path in (model, file, file.parent))
    assert not is_model(model / "config.json")
    assert not is_model(tmp_path / "nowhere.gguf")


def test_safetensors_come_before_a_gguf_beside_them(both):
    model, file = both
    file.rename(model / "m.gguf")
    assert isinstance(open_model(model).source, Checkpoint)
    assert isinstance(open_model(model / "m.gguf").source, GGUFCheckpoint)


def test_a_gguf_repository_may_hold_a_config_too(both):
    _, file = both
    (file.parent / "config.json").write_text("{}")
    assert isinstance(open_model(file.parent, quant="none").source, GGUFFloats)


def test_one_of_several_files_must_be_named(both):
    model, file = both
    to_gguf(file.parent / "n.gguf", model)
    with pytest.raises(ModelError, match=r"gguf holds m\.gguf, n\.gguf; name one of these files"):
        load_tokenizer(file.parent)
    assert load_tokenizer(file).size == load_tokenizer(model).size


def test_floats_are_of_the_wanted_dtype(both):
    _, file = both
    opened = open_model(file, torch.bfloat16, quant="none")
    entries = opened.source.entries
    assert opened.config.dtype == torch.float32
    assert {entry.dtype for entry in entries.values()} == {"BF16"}
    assert {tensor.dtype for _, tensor in opened.source.read(list(entries))} == {torch.bfloat16}


def test_a_gguf_generates_what_its_directory_does(both):
    model, file = both
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    theirs = LLM(model, device="cpu").generate("Hello world", params)[0].outputs[0].token_ids
    for path in (file, str(file.parent)):
        llm = LLM(path, file, device="cpu")
        assert llm.generate("Hello world", params)[0].outputs[0].token_ids == theirs
    assert llm.encode_chat([{"role": "user", "content": "hi"}])


def test_a_path_that_is_no_model_is_refused(both):
    model, _ = both
    with pytest.raises(ParameterError, match=r"must be a model directory or a GGUF file on this machine"):
        LLM(model / "config.json")


def test_a_config_that_the_tensors_do_not_fit_is_refused(both):
    model, file = both
    to_gguf(file, model, metadata={"llama.feed_forward_length": 64})
    with pytest.raises(ModelError, match=r"m\.gguf: model\.layers\.0\.mlp\.down_proj\.weight has shape \[64, 96\]"):
        LLM(file)


def test_a_tied_embedding_is_quantised_with_its_head_and_another_is_not(tmp_path):
    tied = Llama.load(make_model_dir(tmp_path / "tied", tie=True), quant="int4").weights
    assert isinstance(tied.embed, Int8Weight)
    assert tied.lm_head is tied.embed
    assert isinstance(tied.layers[0].q.weight, Int4Weight)
    untied = Llama.load(make_model_dir(tmp_path / "untied", tie=False), quant="int8").weights
    assert isinstance(untied.embed, torch.Tensor)
    assert isinstance(untied.lm_head, Int8Weight)


def test_a_run_says_what_it_rounds(both, capsys):
    model, file = both
    to_gguf(file, model, kind=Kind.Q5_1)
    assert run.main([str(file), "--prompt", "Hello", "--max-tokens", "2"]) == 0
    assert "tensors of type Q5_1 are rounded to int8 in groups of 32" in capsys.readouterr().err
