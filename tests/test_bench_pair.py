"""The benches of a model pair run, and what they report is what happened."""

import json
import math
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from bench import acceptance, cpu_pair, equals_transformers, long_prompt, prefix, quality, rows, throughput
from bench.perplexity import Windows, losses, perplexity
from lychee.kernels import OPS
from lychee.models.batch import Batch
from lychee.models.kv_cache import KVCache
from lychee.models.llama import Llama
from lychee.models.tokenizer_files import load_tokenizer
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


def test_prefix_times_a_prompt_that_comes_again(pair, capsys):
    prefix.main([*pair, "--lengths", "32", "33", "--repeats", "2"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[:2] for row in rows] == [["32", "31"], ["33", "32"]]
    assert all(float(number) > 0 for row in rows for number in row)


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (["--rows", "0"], "argument --rows: is '0', must be numbers of at least 1"),
        (["--rows", "a"], "argument --rows: is 'a', must be numbers of at least 1"),
        (["--context", "99999"], "--context is 99999, must be from 0 to"),
        (["--model", "nowhere"], "nowhere/config.json does not exist"),
    ],
)
def test_rows_refuses_in_a_sentence(pair, bad, sentence, capsys):
    with pytest.raises(SystemExit):
        rows.main([*pair, *bad])
    assert sentence in (error := capsys.readouterr().err)
    assert error.count("\n") == 1


def test_throughput_decodes_the_same_requests_both_ways(pair, tmp_path):
    flags = ["--requests", "2", "3", "--runs", "2", "--max-tokens", "8", "--tree", "1,1"]
    throughput.main([*pair, *flags, "--json", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())
    assert [row["requests"] for row in found] == [2, 3]
    for row in found:
        assert all(len(row[name]) == 2 and min(row[name]) > 0 for name in throughput.NAMES)
        assert 1.0 < row["emitted"] <= 3.0
        median, low, high = row["ratio"]
        assert low <= median <= high


def test_the_gaps_of_streams_are_shorter_with_a_smaller_budget(pair, tmp_path):
    flags = ["--streams", "2", "--tokens", "96", "--budgets", "16", "96", "--runs", "2", "--native"]
    long_prompt.main([*pair, *flags, "--json", str(tmp_path / "out.json")])
    small, large = json.loads((tmp_path / "out.json").read_text())
    assert (len(small["gaps_ms"]), len(large["gaps_ms"])) == (12, 2)  # of two runs
    assert all(min(row["tokens_per_second"]) > 0 and row["two_passes_over_one"] > 0 for row in (small, large))


@pytest.mark.parametrize("bad", [["--runs", "0"], ["--requests", "8", "0"], ["--tree", "x"]])
def test_throughput_refuses_in_a_sentence(pair, bad, capsys):
    with pytest.raises(SystemExit):
        throughput.main([*pair, *bad])
    assert bad[0].lstrip("-") in (error := capsys.readouterr().err)
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


def test_quality_is_measured_by_format_cache_and_pair(pair, tmp_path):
    (tmp_path / "text.txt").write_text("Hello world. The quick brown fox jumps over the lazy dog. " * 9)
    (tmp_path / "stories.txt").write_text("Once upon a time\n")
    flags = ["--text", str(tmp_path / "text.txt"), "--prompt-file", str(tmp_path / "stories.txt"), "--max-tokens", "6"]
    flags += ["--window", "33", "--max-windows", "3", "--formats", "file", "int8", "int4-g64"]
    quality.main([*pair, *flags, "--json", str(tmp_path / "out.json")])
    record = json.loads((tmp_path / "out.json").read_text())
    found = {(row["weights"], row.get("kv_cache")): row for row in record["perplexity"]}
    assert found.keys() == {*product(("none", "file", "int8"), ("auto", "int8")), ("int4-g64", None)}
    assert "in_features" in found["int4-g64", None]["refused"]
    assert found["file", "auto"]["over_floats"] == 0.0
    assert 0 < abs(found["int8", "auto"]["over_floats"]) < 0.05
    assert [(row["target"], row["draft"]) for row in record["acceptance"][::2]] == list(quality.PAIRS)
    assert all(row["acceptance_rate"] == 1.0 for row in record["acceptance"] if row["target"] == row["draft"])


def test_perplexity_is_that_of_logits_computed_together(pair):
    """Every token but a window's first is predicted once, from those before it in the window."""
    model = Llama.load(pair[1])
    windows = Windows.of(load_tokenizer(Path(pair[1])), "Hello world, how many lychees are there?", 9, None)
    assert windows.skipped == 1
    assert all(window[0] == 1 and len(window) == 9 for window in windows.tokens)
    kv = KVCache.allocate(model.config, 1, 16, torch.float32, "cpu")
    expected = []
    for window in windows.tokens:
        logits = model.forward(Batch.prefill([window], [0], [[0]], 16), kv).double().log_softmax(-1)
        expected.append(-sum(float(logits[i, window[i + 1]]) for i in range(8)) / 8)
    assert losses(model, windows, None, torch.device("cpu")) == pytest.approx(expected, rel=1e-5)
    assert perplexity(expected) == pytest.approx(math.exp(sum(expected) / len(expected)))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (["--formats", "int3"], "quantisation format is 'int3'"),
        (["--window", "1"], "--window must be at least 2"),
        (["--window", "99999"], "must be at most the model's 256"),
        (["--text", "nowhere.txt"], "No such file"),
        (["--text", "EMPTY"], "does not fill a window of 256 tokens"),
    ],
)
def test_quality_refuses_in_a_sentence(pair, bad, message, capsys, tmp_path):
    (tmp_path / "empty").write_text("short")
    with pytest.raises(SystemExit):
        quality.main([*pair, *(str(tmp_path / "empty") if part == "EMPTY" else part for part in bad)])
    assert message in capsys.readouterr().err


def test_the_comparison_with_transformers_says_what_it_needs(tmp_path, capsys, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(SystemExit):
        equals_transformers.main([str(tmp_path / "model.gguf")])
    assert "needs the packages transformers, accelerate and gguf" in capsys.readouterr().err
