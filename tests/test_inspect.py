"""lychee inspect: a pass as text with costs, its sums by op, and a sentence for what cannot be inspected."""

import json

import pytest

from lychee import inspect_cli
from lychee.inspect_pass import Effort
from tests.factory import make_model_dir

SMALL = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 96}


@pytest.fixture
def inspect(capsys, monkeypatch):
    """Runs the command with peaks and times that are measured in no time."""
    monkeypatch.setattr(inspect_cli, "Effort", lambda seconds: Effort(seconds and 0.01, 1 << 20, 64))

    def call(*argv):
        code = inspect_cli.main([*map(str, argv)])
        return code, *capsys.readouterr()

    return call


def test_the_pass_is_printed_call_by_call_with_costs_and_sums(inspect, tmp_path):
    model, file = make_model_dir(tmp_path / "m", **SMALL), tmp_path / "out.json"
    code, out, err = inspect(model, "--rows", 3, "--context", 40, "--json", file)
    assert (code, err) == (0, "")
    found = json.loads(file.read_text())
    assert (found["rows"], found["context"], found["replay"]) == (3, 40, None)
    down = next(line for line in found["lines"] if "@layers.1.down" in line["text"])
    assert down["cost"] == {"flops": 2 * 3 * 96 * 64, "bytes": 4 * (3 * 96 + 96 * 64 + 3 * 64)}
    peaks = found["peaks"]
    for line in found["lines"]:
        floors = line["cost"]["bytes"] / peaks["bytes_per_s"], line["cost"]["flops"] / peaks["flops_per_s"]["float32"]
        assert line["floor"] == pytest.approx(max(floors))
        assert f"{line['text']}   # " in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert (rows["linear"][1], rows["gated_linear"][1]) == ("10", "2")
    assert rows["all"][1] == str(len(found["lines"]))
    assert "peaks of this run: " in out
    assert "floor / time" not in out


def test_measured_times_are_summed_by_op(inspect, tmp_path):
    model, file = make_model_dir(tmp_path / "m", **SMALL), tmp_path / "out.json"
    code, out, _ = inspect(model, "--measure", "--summary", "--target-quant", "int4", "--json", file)
    assert code == 0
    found = json.loads(file.read_text())
    assert found["replay"] > 0
    assert "%0" not in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    for op in ("linear_int4", "attention", "lm_head_int8"):
        taken = sum(line["seconds"] for line in found["lines"] if line["op"] == op)
        assert float(rows[op][5].replace(",", "")) == pytest.approx(1e6 * taken, abs=0.06)
    assert rows["all"][-1] == "100%"
    assert "replayed as one: " in out


def test_the_packaged_pair_is_inspected_without_arguments(inspect):
    assert "packaged target: 1 row after 128 tokens" in inspect("--summary")[1]
    assert "packaged draft: 2 rows after 128 tokens" in inspect("--summary", "--draft", "--rows", 2)[1]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--rows", "0"], "--rows is 0 and --context 128, must be at least 1 and 0, together at most "),
        (["--context", "99999"], "--context 99999, must be"),
        (["--draft-model", "x"], "--draft-model has no use without --draft"),
        (["--draft-quant", "int8"], "--draft-quant has no use without --draft"),
        (["--draft", "--target-quant", "int8"], "--target-quant has no use with --draft, whose pass is the draft's"),
        (["--memory", "--rows", "1"], "--rows has no use with --memory"),
        (["--memory", "--context", "0"], "--context has no use with --memory"),
        (["--memory", "--measure"], "--measure has no use with --memory"),
        (["--memory", "--summary"], "--summary has no use with --memory"),
        (["--memory", "--json", "x.json"], "--json has no use with --memory"),
        (["somewhere", "--draft"], "--draft needs a --draft-model"),
        (["--json", "/nowhere/x.json"], "--json is /nowhere/x.json, whose directory does not exist"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(inspect, argv, sentence):
    code, out, err = inspect(*argv)
    assert (code, out) == (2, "")
    assert err.startswith("lychee inspect: ")
    assert sentence in err
