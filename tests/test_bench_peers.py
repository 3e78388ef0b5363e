"""The bench against peers asks all sides for the same in turn, and reports where their tokens part."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from bench import peers
from bench.peer_sides import REFERENCE, Setup, Side, all_sides, compare, measure, show
from bench.peer_sides.client import ROOT, Client, MissingError, SideError
from tests.factory import make_model_dir
from tests.models.gguf_factory import to_gguf

FAKE = "tests.peer_fake:FakeSide"


def setup(**options: object) -> Setup:
    return Setup("model.gguf", None, None, 1, 64, None, options)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    root = tmp_path_factory.mktemp("peers")
    directory = make_model_dir(root / "model", tie=False)
    chat = {"tokenizer.chat_template": "{{ messages[0]['content'] }}"}
    draft = make_model_dir(root / "draft", tie=False, noise_of=directory)
    prompts = root / "prompts.json"
    prompts.write_text(json.dumps([{"kind": "chat", "text": text} for text in ("Hello world", "The dog")]))
    return to_gguf(root / "model.gguf", directory, metadata=chat), draft, prompts


def test_every_side_has_every_turn_and_another_goes_first_each_time():
    made = list(measure.turns(["a", "b"], 2, 2))
    assert Counter(made) == dict.fromkeys(((r, p, s) for r in (0, 1) for p in (0, 1) for s in "ab"), 1)
    assert [side for _, _, side in made[::2]] == ["a", "b", "b", "a"]


def test_a_side_is_stopped_until_it_is_asked():
    with Client(Side("fake", FAKE), setup()) as client:
        assert os.WIFSTOPPED(os.waitpid(client._process.pid, os.WUNTRACED)[1])
        assert client.generate([5], 3).tokens == [6, 7, 8]
        assert client.rows([1, 4], 500, 2) == [[1.5, 4.5]] * 2
        assert os.WIFSTOPPED(os.waitpid(client._process.pid, os.WUNTRACED)[1])
    assert client._process.returncode is not None


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl and /proc")
def test_a_stopped_side_ends_with_a_bench_that_is_killed():
    code = (
        "import os, signal; from bench.peer_sides import Setup, Side; from bench.peer_sides.client import Client\n"
        f"client = Client(Side('fake', {FAKE!r}), Setup('model.gguf', None, None, 1, 64, None, {{}}))\n"
        "print(client._process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT).stdout)
    deadline = time.monotonic() + 20
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    """Not gone, and not only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_side_that_cannot_be_imported_is_told_from_one_that_ends():
    with pytest.raises(MissingError, match="no_such_package"):
        Client(Side("missing", "no_such_package:Side"), setup())
    with (
        Client(Side("fake", FAKE), setup(off="dies")) as client,
        pytest.raises(SideError, match="RuntimeError: no more"),
    ):
        client.generate([5], 3)


def test_partings_have_the_reference_margin():
    sides = {REFERENCE: Side(REFERENCE, FAKE), "off": Side("off", FAKE, {"off": {"20": 2}}, plain=REFERENCE)}
    prompts = [[10], [20]]
    with Client(sides[REFERENCE], setup()) as right, Client(sides["off"], setup(off={"20": 2})) as wrong:
        clients = {REFERENCE: right, "off": wrong}
        samples = list(measure.samples(clients, prompts, 4, 2))
        found = compare.summaries(sides, clients, samples, prompts)
        assert measure.pass_ms(clients, [1], 0, 1) == {}
    off = found["off"]
    assert found[REFERENCE].identical == 1
    assert (off.identical, off.as_plain, off.repeats) == (0.5, 0.5, True)
    assert off.partings == [compare.Parting(1, 2, pytest.approx(0.1))]
    assert off.rate == pytest.approx(8)
    assert off.decode_rate == pytest.approx(3 / 0.4)
    assert off.per_pass == 1


def test_where_tokens_part():
    assert compare.parting([1, 2], [1, 2]) is None
    assert compare.parting([1, 2], [1, 3]) == 1
    assert compare.parting([1, 2], [1]) == 1


def test_lychee_decodes_the_file_and_what_is_missing_is_said(model, tmp_path, monkeypatch, capsys):
    file, draft, prompts = model
    sides = all_sides() | {"gone": Side("gone", "no_such_package:Side")}
    monkeypatch.setattr(peers, "all_sides", lambda: sides)
    flags = ["--model", str(file), "--draft-model", str(draft), "--prompts", str(prompts), "--max-tokens", "6"]
    flags += [
        "--rounds",
        "1",
        "--threads",
        "1",
        "--rows",
        "1,3",
        "--context",
        "8",
        "--json",
        str(tmp_path / "out.json"),
    ]
    peers.main([*flags, "--sides", "lychee-fp32,lychee-fp32-speculative,gone"])
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["sides"].keys() == {"lychee-fp32", "lychee-fp32-speculative"}
    assert record["sides"]["lychee-fp32-speculative"]["as_plain"] == 1
    assert record["sides"]["lychee-fp32-speculative"]["per_pass"] >= 1  # what is planned depends on what rounds take
    assert {name: list(ms) for name, ms in record["pass_ms"].items()} == {
        "lychee fp32": ["1", "3"],
        "lychee draft": ["1", "3"],
    }
    assert all(len(sample["made"]["tokens"]) == 6 for sample in record["samples"])
    assert "gone is missing: No module named 'no_such_package'" in capsys.readouterr().out


@pytest.mark.parametrize(
    "bad",
    [
        ["--model", "nowhere.gguf"],
        ["--rounds", "0"],
        ["--sides", "gpt"],
        ["--sides", "lychee-fp32-speculative"],
        ["--rows", "0"],
    ],
)
def test_bad_flags_are_refused_in_a_sentence(model, bad, capsys):
    with pytest.raises(SystemExit):
        peers.main(["--model", str(model[0]), *bad])
    assert "must be" in (error := capsys.readouterr().err) or "needs a" in error
    assert "Traceback" not in error


def test_the_prompts_are_varied():
    prompts = json.loads(Path(peers.PROMPTS).read_text())
    assert {prompt["kind"] for prompt in prompts} == {"chat", "code", "prose"}
    assert len({prompt["text"] for prompt in prompts}) == len(prompts) == 10


def test_a_figure_without_matplotlib_is_refused_in_a_sentence(model, monkeypatch, capsys):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        peers.main(["--model", str(model[0]), "--figure", "rates.png"])
    assert "--figure needs matplotlib" in capsys.readouterr().err


def test_the_figure_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    one = compare.Summary(8.0, None, None, None, None, None, None, True)
    show.figure(tmp_path / "rates.png", "a title", {"fake": one}, {"fake": {1: 2.0, 4: 3.0}})
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
