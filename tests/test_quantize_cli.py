"""`lychee quantize`: a model that opens, a table of what was lost, and one sentence for what cannot be done."""

import sys

import pytest

from lychee import __main__, demo, quantize_cli
from lychee.models.files import read_json
from lychee.models.open_checkpoint import open_checkpoint
from tests.factory import make_model_dir

SMALL = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 96}


@pytest.fixture
def model(tmp_path):
    return make_model_dir(tmp_path / "model", **SMALL)


@pytest.fixture
def quantize(capsys):
    def call(*argv):
        code = quantize_cli.main([*map(str, argv)])
        return code, *capsys.readouterr()

    return call


@pytest.mark.parametrize("name", ["int8", "int8-g32", "int4", "int4-g32-sym", "int4-g32-zero"])
def test_the_model_opens_and_the_table_has_a_row_for_each_kind(quantize, model, tmp_path, name):
    code, out, err = quantize(model, tmp_path / "q", "--format", name)
    assert (code, err) == (0, "")
    full = {"int4": "int4-g32-min"}.get(name, name)
    values = read_json(tmp_path / "q" / "config.json")
    assert values["quantization_config"] == {"quant_method": "lychee", "format": full}
    source = open_checkpoint(tmp_path / "q", values)
    assert source.entries["model.layers.1.mlp.down_proj.weight"].dtype == full
    rows = {line.split()[0]: line.split() for line in out.splitlines()}
    for kind in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        assert rows[kind][1:3] == ["2", full]
        assert (
            (0.2 < float(rows[kind][3].rstrip("%")) < 1.5)
            if "int8" in name
            else (float(rows[kind][3].rstrip("%")) < 15)
        )
    assert rows["embed_tokens"][1:3] == ["1", "int8"]
    assert rows["others"][1:4] == ["5", "kept", "-"]
    assert float(rows["all"][4]) < float(rows["all"][2])


def test_the_packaged_target_keeps_nearly_all_of_itself(quantize, tmp_path):
    code, out, _ = quantize(demo.TARGET, tmp_path / "q", "--format", "int8")
    assert code == 0
    for line in out.splitlines()[1:-2]:
        assert float(line.split()[3].rstrip("%")) < 1.5


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["MODEL", "OUT"], "the following arguments are required: --format"),
        (["MODEL", "OUT", "--format", "int5"], "--format: quantisation format is 'int5', must be int8, int8-g32, int4"),
        (["MODEL", "OUT", "--format", "int8", "--fast"], "unrecognized arguments: --fast"),
        (["MODEL", "OUT", "--form", "int8"], "required: --format"),
        (["NOWHERE", "OUT", "--format", "int8"], "nowhere, must be a directory"),
        (["MODEL", "MODEL", "--format", "int8"], "exists, must be absent or an empty directory"),
        (["MODEL", "NOWHERE/OUT", "--format", "int8"], "the directory it would be in does not exist"),
        (
            ["MODEL", "OUT", "--format", "int4-g64"],
            "has 96 in_features, int4-g64-min needs a multiple of 64; int4-g32-min",
        ),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_exit_code_2(quantize, model, tmp_path, argv, message):
    places = {"MODEL": str(model), "OUT": str(tmp_path / "q"), "NOWHERE": str(tmp_path / "nowhere")}
    places["NOWHERE/OUT"] = str(tmp_path / "nowhere" / "q")
    code, out, err = quantize(*(places.get(arg, arg) for arg in argv))
    assert (code, out) == (2, "")
    assert err.startswith("lychee quantize: ")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "q").exists()


def test_it_is_a_command(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lychee", "--help"])
    assert __main__.main() == 0
    assert "quantize   `lychee quantize`: write a model again" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["lychee", "quantize", "--help"])
    with pytest.raises(SystemExit, match="0"):
        __main__.main()
    shown = capsys.readouterr().out
    assert "int4-gN-KIND" in shown
    assert "--format" in shown
