"""The CPU backend's tests under several releases of Triton: `python -m bench.triton_versions --versions 3.6.0,3.7.1`.

Each release gets a fresh environment in a temporary directory. It holds that Triton alone and finds all else in the
environment that runs this script; with `--full` everything is installed anew from the package index.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.parser import Parser

ROOT = Path(__file__).parent.parent
VERSIONS = "3.6.0,3.7.1,3.8.0,3.9.0"
TESTS = ["tests/backends", "tests/kernels"]
BESIDES = {"3.6.0": ["numpy<2.4"]}  # its interpreter converts arrays to scalars in ways that numpy 2.4 gave up
LINE = "{:<8} {:>7} {:>7} {:>8} {:>8}  {}"


@dataclass(frozen=True)
class Outcome:
    """Counts of tests, or what went wrong before any ran."""

    version: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    note: str = ""

    def __str__(self) -> str:
        seconds = f"{self.seconds:.0f}"
        return LINE.format(self.version, self.passed, self.failed, self.skipped, seconds, self.note).rstrip()


def environment(version: str, path: Path, full: bool, links: str | None) -> Path:
    """A new environment with this Triton; gives its Python. Raises CalledProcessError."""
    venv.create(path, with_pip=True)
    python = path / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if full:
        subprocess.run([*pip, "-c", "constraints.txt", ".[test]"], cwd=ROOT, check=True)
    else:
        [site] = path.glob("lib/python*/site-packages")
        shared = sysconfig.get_path("purelib")  # behind the environment's own packages
        (site / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
    source = ["--find-links", links] if links else []
    subprocess.run(
        [*pip, "--no-deps", "--force-reinstall", *source, f"triton=={version}", *BESIDES.get(version, [])], check=True
    )
    return python


def counts(summary: str) -> dict[str, int]:
    """The numbers in pytest's last line, by what they count; errors are failures."""
    found = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|errors?)", summary)}
    failed = found.get("failed", 0) + found.get("error", 0) + found.get("errors", 0)
    return {"passed": found.get("passed", 0), "failed": failed, "skipped": found.get("skipped", 0)}


def outcome(version: str, arguments: argparse.Namespace) -> Outcome:
    """Build the environment, run the tests and count. Failing tests print as they do in pytest."""
    with tempfile.TemporaryDirectory(prefix=f"triton-{version}-") as directory:
        try:
            python = environment(version, Path(directory, "env"), arguments.full, arguments.find_links)
        except subprocess.CalledProcessError as error:
            return Outcome(version, note=f"no environment: {error}")
        env = {**os.environ, "TRITON_CACHE_DIR": str(Path(directory, "cache"))}
        says = [python, "-c", "import triton; print(triton.__version__)"]
        installed = subprocess.run(says, cwd=directory, env=env, capture_output=True, text=True)
        if installed.stdout.strip() != version:
            return Outcome(version, note=f"Triton does not import: {installed.stderr.strip() or installed.stdout}")
        start = time.perf_counter()
        command = [python, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", *arguments.tests]
        run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        last = (run.stdout.strip().splitlines() or [""])[-1]
        if run.returncode:
            print(run.stdout[-20_000:], run.stderr[-2_000:], file=sys.stderr)
        note = "" if run.returncode in (0, 1) else f"pytest ended with {run.returncode}: {last}"
        return Outcome(version, **counts(last), seconds=time.perf_counter() - start, note=note)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per release as it is done; 1 when a test failed or none ran."""
    parser = Parser(__doc__)
    parser.add_argument("--versions", default=VERSIONS, type=lambda text: text.split(","))
    parser.add_argument("--full", action="store_true", help="install everything anew, not Triton alone")
    parser.add_argument("--find-links", help="directory with Triton's wheels, besides the index")
    parser.add_argument("tests", nargs="*", default=TESTS, help="what pytest runs")
    arguments = parser.parse_args(argv)
    print(LINE.format("triton", "passed", "failed", "skipped", "seconds", ""))
    outcomes = []
    for version in arguments.versions:
        outcomes.append(outcome(version, arguments))
        print(outcomes[-1], flush=True)
    return int(any(one.failed or not one.passed for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
