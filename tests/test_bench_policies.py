"""`bench.policies` runs what it was asked for, each beside `auto` in the same run, and refuses what is no policy."""

import json

import numpy as np
import pytest

from bench import policies


def test_a_prompt_that_was_slow_in_one_run_does_not_count():
    ours = np.array([[1.0, 2.0], [9.0, 2.0], [1.0, 2.0]])
    theirs = np.array([[2.0, 1.0], [2.0, 1.0], [2.0, 50.0]])
    median, low, high = policies.faster(ours, theirs)
    assert median == 1.0
    assert low < 1.0 < high


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
