"""`bench.policies` runs what it was asked for, each beside `auto` in the same run, and refuses what is no policy."""

import json

import numpy as np
import pytest

from bench import alternate, policies
from lychee.runtime.controller import Fixed, Window
from lychee.runtime.tree import TreeShape

AUTO = Fixed(TreeShape.chain(9))  # stands for the engine's own


@pytest.mark.parametrize(("name", "shape"), [("3", TreeShape.chain(3)), ("2,1", TreeShape.widths((2, 1)))])
def test_a_policy_is_a_length_or_a_tree(name, shape):
    assert alternate.controller_of(name, AUTO) == Fixed(shape)


def test_a_policy_has_a_name():
    assert alternate.controller_of("native", AUTO) is None
    assert alternate.controller_of("auto", AUTO) is AUTO
    assert isinstance(alternate.controller_of("window", AUTO), Window)


def test_a_prompt_that_was_slow_in_one_run_does_not_count():
    ours = np.array([[1.0, 2.0], [9.0, 2.0], [1.0, 2.0]])
    theirs = np.array([[2.0, 1.0], [2.0, 1.0], [2.0, 50.0]])
    median, low, high = policies.faster(ours, theirs)
    assert median == 1.0
    assert low < 1.0 < high


def test_the_ratio_is_of_the_same_run():
    median, low, high = alternate.ratio([10.0, 100.0, 1000.0], [5.0, 50.0, 500.0])
    assert (median, low, high) == (2.0, 2.0, 2.0)
    assert alternate.ratio([1.0, 2.0, 9.0], [1.0, 1.0, 1.0])[1:] == (1.0, 9.0)


@pytest.mark.parametrize("arguments", [["nothing"], ["4", "--runs", "0"], ["4", "--prompt-file", "/no/such/file"]])
def test_what_cannot_be_measured_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        policies.main(arguments)
    assert ended.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_all_policies_complete_the_same_prompts(tmp_path, capsys):
    path = tmp_path / "found.json"
    policies.main(["native", "3", "2,1", "--runs", "2", "--prompts", "2", "--max-tokens", "12", "--json", str(path)])
    found = {one["policy"]: one for one in json.loads(path.read_text())}
    assert list(found) == ["auto", "native", "3", "2,1"]
    assert all(len(one["tokens_per_second"]) == 2 and min(one["tokens_per_second"]) > 0 for one in found.values())
    assert found["native"]["emitted"] == 1.0 < found["3"]["emitted"] <= 4.0
    assert found["auto"]["auto"] == [1.0, 1.0, 1.0]
    assert "tokens/s" in capsys.readouterr().out
