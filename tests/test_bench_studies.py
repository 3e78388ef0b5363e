"""Every study runs on a pair, prints its table, and leaves a figure and the numbers it was drawn from."""

import json

import pytest

from bench.studies import sweeps
from bench.studies.__main__ import STUDIES, main
from tests.factory import make_model_dir

SMALL = ["--runs", "1", "--prompts", "2", "--max-tokens", "6"]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("studies")
    target = make_model_dir(root / "target", seed=1)
    (root / "prompts.txt").write_text("Once upon a time\nThe sea\n")
    draft = make_model_dir(root / "draft", noise_of=target)
    return ["--model", str(target), "--draft-model", str(draft), "--prompt-file", str(root / "prompts.txt")]


@pytest.fixture(autouse=True)
def few_points(monkeypatch):
    monkeypatch.setattr(sweeps, "TEMPERATURES", (0.0, 1.2))
    monkeypatch.setattr(sweeps, "BATCHES", (1, 3))


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_gives_a_table_a_figure_and_its_numbers(name, pair, tmp_path, capsys):
    main([name, *pair, *SMALL, "--out", str(tmp_path)])
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert (tmp_path / f"{name}.png").read_bytes()[:8] == PNG
    assert record["rows"]
    assert all(record["figure"]["lines"].values())
    assert f"bench.studies {name}" in record["command"]
    printed = capsys.readouterr().out
    assert record["title"] in printed
    assert str(tmp_path / f"{name}.png") in printed


def test_speed_over_native_is_of_the_same_point(pair, tmp_path):
    main(["batch", *pair, *SMALL, "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "batch.json").read_text())["rows"]
    for requests in (1, 3):
        by = {row["policy"]: row for row in rows if row["requests together"] == requests}
        assert by["native"]["over native"] == [1.0, 1.0, 1.0]
        assert by["4"]["over native"][0] == pytest.approx(by["4"]["tokens/s"] / by["native"]["tokens/s"])
        assert by["native"]["acceptance"] is None
        assert 0 <= by["4"]["acceptance"] <= 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["ladder", "--runs", "0"], "--runs is 0, must be at least 1"),
        (["ladder", "--prompt-file", "/no/such/file"], "/no/such/file"),
        (["batch", "--prompt-file", "/dev/null"], "--prompt-file /dev/null has no prompts"),
        (["tide"], "invalid choice: 'tide'"),
    ],
)
def test_what_cannot_be_studied_is_refused(arguments, sentence, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert sentence in (error := capsys.readouterr().err)
    assert "Traceback" not in error
