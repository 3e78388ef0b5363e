"""The CPU bench times the sides of a case in turn, on weights that no cache holds, and reports what it measured."""

import json
from types import SimpleNamespace

import pytest
import torch
from triton import knobs

from bench import cpu_cases, cpu_compile, cpu_kernels
from bench.cpu_cases import Walk


def run(tmp_path, *flags):
    file = tmp_path / "timings.json"
    cpu_kernels.main([*flags, "--budget", "0", "--threads", "1", "--json", str(file)])
    return json.loads(file.read_text())


def test_every_case_of_the_asked_sections_is_timed(tmp_path, capsys):
    flags = ["--section", "linear,pass,attention,rows", "--model", "demo-draft", "--rows", "1,2", "--pool", "5"]
    record = run(tmp_path, *flags)
    timed = {(t["section"], t["label"], t["rows"]) for t in record["timings"]}
    shapes = ["128 to 128", "128 to 64", "128 to 224", "224 to 128", "128 to 4096"]
    labels = [("linear", shape) for shape in shapes] + [("attention", "100 keys"), ("attention", "512 keys")]
    labels += [("pass", kind) for kind in ("fp32", "int4", "int8")]
    labels += [("rows", op) for op in ("rms_norm", "add_rms_norm", "rope_store", "swiglu")]
    assert timed == {(*label, rows) for label in labels for rows in (1, 2)}
    for timing in record["timings"]:
        theirs = min(seconds for side, seconds in timing["seconds"].items() if side.startswith("torch"))
        assert timing["ratio"] == pytest.approx(theirs / timing["seconds"]["ours"])
        read = timing["section"] == "pass" or (timing["section"] == "linear" and timing["rows"] == 1)
        assert (timing["of_read"] is not None) == read
    assert set(record["geometric_means"]) == {
        s for n in ("linear", "pass", "attention", "rows") for s in (n, f"{n}, demo-draft")
    }
    assert "224 to 128" in capsys.readouterr().out


def test_sampling_is_timed_for_every_kind_of_request(tmp_path):
    record = run(tmp_path, "--section", "sampling", "--vocab", "64", "--rows", "2", "--pool", "1")
    kinds = {"process_logits": ["greedy", "temperature", "top-k, top-p"], "draw": ["greedy", "noise"]}
    assert [t["label"] for t in record["timings"]] == [f"{op}, {kind}" for op in kinds for kind in kinds[op]]


def test_sides_that_disagree_are_not_timed():
    with pytest.raises(AssertionError):
        cpu_cases.checked("rows", "", "", 1, lambda: torch.ones(2), {"torch": lambda: torch.zeros(2)})


def test_no_weight_is_read_again_before_all_others_were():
    walk = Walk(torch.arange(7 * 6.0), 2, 3)
    seen: list[float] = []
    for _ in range(3):
        walk.apply(lambda weight: seen.append(float(weight[0, 0])))
        walk.read(lambda span: seen.extend(span[::6].tolist()))
    assert walk.calls == 3
    assert seen == [0, 6, 12, 18, 24, 30] * 3
    with pytest.raises(ValueError, match="must fit twice"):
        Walk(torch.zeros(11), 2, 3)


def test_another_side_goes_first_in_every_turn():
    order: list[str] = []
    sides = {name: lambda name=name: order.append(name) for name in "abc"}
    cpu_kernels.in_turn(sides, budget=0, least=3)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"


def test_the_geometric_mean_of_a_ratio_and_its_inverse_is_one():
    assert cpu_kernels.geometric_mean([4.0, 0.25, 1.0]) == pytest.approx(1.0)


def test_a_first_call_of_every_op_is_counted(monkeypatch):
    def once(x):
        times = SimpleNamespace(total=2_000_000)
        knobs.compilation.listener(src=x, metadata={"name": "made"}, metadata_group={}, times=times, cache_hit=False)

    def sample(dtype, device, **sizes):
        assert sizes == {"num_tokens": 4, "width": 3}
        return {"x": torch.zeros(1)}

    once.axes, once.typical, once.sample = ("num_tokens", "width"), {"num_tokens": 100, "width": 3}, sample
    monkeypatch.setattr("lychee.kernels.OPS", {"once": once})
    process = cpu_compile.call_every_op()
    assert process.kernels[-1] == cpu_compile.Kernel("once", "made", 2.0, False)
    # An earlier process may have compiled what is launched first.
    assert {(kernel.op, kernel.name) for kernel in process.kernels[:-1]} <= {("set-up", "nothing")}
    assert process.first_calls.keys() == {"set-up", "once"}
    assert knobs.compilation.listener is None


@pytest.mark.parametrize("bad", [["--section", "conv"], ["--model", "gpt"], ["--rows", "0"], ["--threads", "0"]])
def test_bad_flags_are_refused_in_a_sentence(bad, capsys):
    with pytest.raises(SystemExit):
        cpu_kernels.main(bad)
    assert "must be" in (error := capsys.readouterr().err)
    assert "Traceback" not in error
