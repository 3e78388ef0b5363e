"""The benches of a model pair run, and what they report is what happened."""

import json

import pytest
import torch

from bench import acceptance, cpu_pair, rows
from lychee.kernels import OPS
from tests.factory import make_model_dir


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("bench")
    target = make_model_dir(root / "target", seed=1)
    return ["--model", str(target), "--draft-model", str(make_model_dir(root / "draft", noise_of=target))]


def test_rows_times_every_size_of_both_models(pair, tmp_path):
    rows.main([*pair, "--rows", "1,3", "--repeats", "2", "--context", "5", "--json", str(tmp_path / "rows.json")])
    times = json.loads((tmp_path / "rows.json").read_text())
    assert {name: set(sizes) for name, sizes in times.items()} == {"target": {"1", "3"}, "draft": {"1", "3"}}
    assert all(took > 0 for sizes in times.values() for took in sizes.values())


@pytest.mark.parametrize("bad", [["--rows", "0"], ["--rows", "a"], ["--context", "99999"], ["--model", "nowhere"]])
def test_rows_refuses_in_a_sentence(pair, bad, capsys):
    with pytest.raises(SystemExit):
        rows.main([*pair, *bad])
    assert "rows" in (error := capsys.readouterr().err)
    assert "Traceback" not in error


def test_acceptance_of_a_draft_equal_to_the_target_is_one(pair, tmp_path):
    (tmp_path / "stories.txt").write_text("Once upon a time\nThe sea\n")
    prompts = ["--prompt-file", str(tmp_path / "stories.txt"), "--max-tokens", "11", "--length", "3"]
    acceptance.main([*pair, *prompts, "--json", str(tmp_path / "out.json"), "--temperature", "0", "0.8"])
    found = json.loads((tmp_path / "out.json").read_text())
    assert found.keys() == {"stories 0", "stories 0.8"}
    assert all(kind["acceptance_rate"] == 1.0 for kind in found.values())


def test_the_repeated_share_counts_4_grams_seen_before():
    assert acceptance.repeated_share([1, 2, 3, 4, 5, 6]) == 0.0
    assert acceptance.repeated_share([1, 1, 1, 1, 1, 1]) == pytest.approx(2 / 3)
    assert acceptance.repeated_share([1, 2]) == 0.0


def test_the_pair_is_decoded_by_the_references_natively_and_speculatively(pair, tmp_path, monkeypatch):
    calls = []
    real = OPS["swiglu"].reference
    monkeypatch.setattr(OPS["swiglu"], "reference", lambda gate, up: calls.append(gate) or real(gate, up))
    flags = ["--prompts", "2", "--max-tokens", "5", "--repeats", "1", "--json", str(tmp_path / "pair.json")]
    cpu_pair.main([*pair, *flags])
    record = json.loads((tmp_path / "pair.json").read_text())
    assert record["tokens"] == {"reference": 10, "native": 10, "speculative": 10}
    assert record["seconds"].keys() == record["tokens"].keys()
    assert record["identical"]
    called = len(calls)
    assert called > 0
    OPS["swiglu"](torch.ones(1, 2), torch.ones(1, 2))
    assert len(calls) == called
