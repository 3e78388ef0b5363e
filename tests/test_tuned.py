"""The file of `lychee tune`: `run` and `serve` take from it what is not given, and refuse what it was not made for."""

import json
import shutil

import pytest

from lychee import demo, run
from lychee.models.files import ModelError
from lychee.runtime.checks import ParameterError
from lychee.serve import cli as serve
from lychee.tuned import Model, Tuned, parsed
from tests.runtime.pairs import PROMPT, model_dir

OPTIONS = {"dtype": "float32", "target_quant": "int8", "draft_quant": "int4", "kv_cache_dtype": "int8"}


def written(tmp_path, drafts="near", config=None, packaged=False, **changes):
    """A file as tune writes it, `changes` to its keys made afterwards; one that is ... is left out."""
    model = Model.of(None if packaged else str(model_dir()), demo.TARGET)
    found = drafts and Model.of(None if packaged else str(model_dir(drafts)), demo.DRAFT)
    config = {"tree": "2,1", "verify": "auto"} if config is None else config
    options = OPTIONS if found else {"target_quant": "int8"}
    text = Tuned(model, found, config if found else {}, options, 3).as_json({"any": "thing"})
    values = {**json.loads(text), **changes}
    file = tmp_path / "tuned.json"
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
    return file


def arguments(file, *more, parser=run.parser):
    return parsed(parser(), [*map(str, more), "--tuned", str(file)])


def test_what_is_not_given_comes_from_the_file(tmp_path):
    args = arguments(written(tmp_path), "--prompt-file", "p.txt")
    assert (args.model, args.draft_model) == (str(model_dir()), str(model_dir("near")))
    assert (args.tree, args.verify, args.num_speculative_tokens, args.batch_size) == ("2,1", "auto", None, 3)
    assert {name: getattr(args, name) for name in OPTIONS} == OPTIONS


def test_serve_takes_the_same(tmp_path):
    args = arguments(written(tmp_path), parser=serve.parser)
    assert (args.draft_model, args.tree, args.draft_quant) == (str(model_dir("near")), "2,1", "int4")
    assert arguments(written(tmp_path, drafts=None), parser=serve.parser).native


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--num-speculative-tokens", 3], {"num_speculative_tokens": 3, "tree": None, "verify": "auto"}),
        (["--speculative-config", '{"max_draft_len": 2}'], {"tree": None, "verify": "auto"}),
        (["--speculative-config", '{"verify": "coupled"}'], {"tree": "2,1", "verify": None}),
        (["--verify", "coupled"], {"tree": "2,1", "verify": "coupled"}),
        (["--dtype", "auto"], {"dtype": "auto"}),
        (["--draft-quant", "int8"], {"draft_quant": "int8", "target_quant": "int8"}),
        (["--native"], {"native": True, "draft_model": None, "tree": None, "draft_quant": None}),
    ],
)
def test_options_given_win(tmp_path, given, expected):
    args = arguments(written(tmp_path), *given)
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("config", "given", "tree"),
    [
        ({"tree": "chain", "max_draft_len": 16}, ["--max-draft-len", 8], "chain"),
        ({"num_speculative_tokens": 4}, ["--max-draft-len", 8], "chain"),
        ({"num_speculative_tokens": 4}, ["--speculative-config", '{"max_draft_len": 8}'], "chain"),
        ({"tree": "auto"}, ["--node-budget", 8], "auto"),
        ({"tree": "2,1"}, ["--max-draft-len", 8], None),
        ({"tree": "chain"}, ["--tree", "auto"], "auto"),
        ({"tree": "chain"}, ["--num-speculative-tokens", 2], None),
    ],
)
def test_a_limit_that_is_given_does_not_change_what_is_drafted(tmp_path, config, given, tree):
    assert arguments(written(tmp_path, config=config), *given).tree == tree


def test_another_draft_is_taken_with_the_files_lengths(tmp_path):
    args = arguments(written(tmp_path), "--draft-model", model_dir("far"))
    assert (args.draft_model, args.tree) == (str(model_dir("far")), "2,1")


def test_a_verdict_against_drafts_decodes_natively_unless_drafts_are_asked_for(tmp_path):
    file = written(tmp_path, drafts=None)
    assert arguments(file).native
    assert arguments(file).target_quant == "int8"
    assert not arguments(file, "--draft-model", model_dir("near")).native


def test_the_packaged_pair_stays_the_packaged_pair(tmp_path):
    args = arguments(written(tmp_path, packaged=True))
    assert (args.model, args.draft_model) == (None, str(demo.DRAFT))


def test_a_model_that_moved_is_known_again(tmp_path):
    moved = shutil.copytree(model_dir(), tmp_path / "elsewhere")
    assert arguments(written(tmp_path), moved).model == str(moved)


def changed(tmp_path, model):
    """The file of a model one of whose weights is then another."""
    copy = shutil.copytree(model_dir(model), tmp_path / "copy")
    weights = copy / "model.safetensors"
    file = written(tmp_path)
    values = json.loads(file.read_text())
    values["model" if model == "T" else "draft"] |= {"name": str(copy)}
    file.write_text(json.dumps(values))
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    return file


@pytest.mark.parametrize(("model", "what"), [("T", "model"), ("near", "draft")])
def test_a_model_with_other_weights_is_another_model(tmp_path, model, what):
    with pytest.raises(ParameterError, match=f"was made for another {what}"):
        arguments(changed(tmp_path, model))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"format": "else"}, "was not written by `lychee tune`"),
        ({"version": 2}, "has version 2, must be 1"),
        ({"version": ...}, "has version None, must be 1"),
        ({"batch_size": ...}, "must have model, draft, speculative_config, options, batch_size"),
        ({"more": 1}, "must have model"),
        ({"batch_size": 0}, "is damaged: batch_size is 0"),
        ({"batch_size": True}, "is damaged: batch_size is True"),
        ({"options": []}, "is damaged: options is "),
        ({"options": {"temperature": 1}}, "is damaged: options has no 'temperature'"),
        ({"options": {"num_blocks": "9"}}, "is damaged: num_blocks is '9', must be an integer"),
        ({"options": {"dtype": 3}}, "is damaged: dtype is 3, must be a string"),
        ({"speculative_config": {"tree": "0"}}, "is damaged: tree is '0'"),
        ({"speculative_config": {"adaptive": True}}, "is damaged: speculative_config has no 'adaptive'"),
        ({"speculative_config": None}, "is damaged: speculative_config is None"),
        ({"model": "path"}, "is damaged: model is 'path'"),
        ({"model": {"name": 3, "digest": "a"}}, "is damaged: model has the name 3"),
        ({"draft": {"name": None}}, "is damaged: draft is "),
    ],
)
def test_a_file_that_is_not_ours_or_damaged_is_refused(tmp_path, changes, sentence):
    with pytest.raises(ModelError) as refused:
        arguments(written(tmp_path, **changes))
    assert sentence in str(refused.value)
    assert str(tmp_path / "tuned.json") in str(refused.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 1, "format": 2}', "\0"])
def test_what_is_no_object_is_refused_in_a_sentence(tmp_path, text, capsys):
    file = tmp_path / "tuned.json"
    file.write_text(text)
    assert run.main(["--tuned", str(file), "--prompt", PROMPT]) == 2
    error = capsys.readouterr().err
    assert str(file) in error
    assert "Traceback" not in error


def test_comparing_is_refused_where_there_is_nothing_to_compare(tmp_path):
    with pytest.raises(ParameterError, match="--compare has no use with --tuned"):
        arguments(written(tmp_path, drafts=None), "--compare")


def test_run_drafts_what_the_file_says(tmp_path, capsys):
    report = tmp_path / "report.json"
    file = written(tmp_path, config={"num_speculative_tokens": 3}, options={})
    assert run.main(["--tuned", str(file), "--prompt", PROMPT, "--report", str(report), "--max-tokens", "30"]) == 0
    made = json.loads(report.read_text())["runs"]["speculative"]["totals"]["rounds_by_tree"]
    assert made[0]["tree"] == "chain of 3"
