"""The op bench measures, compares with the roofline and writes what it prints."""

import json

import pytest

from bench import ops


def test_bench_times_the_asked_ops_at_the_asked_sizes(tmp_path, capsys):
    file = tmp_path / "timings.json"
    sizes = "num_tokens=2,hidden=64,in_features=32,out_features=48"
    flags = ["--op", "rms_norm,linear", "--dtype", "float32", "--size", sizes, "--budget", "0", "--json", str(file)]
    ops.main(flags)
    norm, linear = json.loads(file.read_text())["timings"]
    assert norm["sizes"] == {"num_tokens": 2, "hidden": 64}
    assert linear["sizes"] == {"num_tokens": 2, "in_features": 32, "out_features": 48, "has_bias": 0}
    assert linear["flops_per_s"] * linear["seconds"] == pytest.approx(2 * 2 * 32 * 48)
    assert linear["of_roofline"] == pytest.approx(linear["floor_seconds"] / linear["seconds"])
    printed = capsys.readouterr().out
    assert "rms_norm" in printed
    assert "GB/s" in printed


def test_unknown_op_is_refused_in_a_sentence(capsys):
    with pytest.raises(SystemExit):
        ops.main(["--op", "conv"])
    assert "--op has 'conv', must be of " in capsys.readouterr().err
