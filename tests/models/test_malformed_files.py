"""Damaged files load to the sizes they should have or are refused in a sentence, in bounded time and memory."""

import os
import subprocess
import sys

import pytest

from tests.models.malformed.worker import KINDS

FIRST_SEED = int(os.environ.get("FUZZ_SEED", "0"))  # another number, other damage


def open_damaged(kind, first, count, folder):
    """What came of each case. Fails where one ended the worker, by a crash or by its limits."""
    command = [sys.executable, "-m", "tests.models.malformed.worker", kind, str(first), str(count), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    outcomes = done.stdout.splitlines()
    assert done.returncode == 0, f"{kind}, seed {outcomes[-1:]}: ended by {done.returncode}: {done.stderr[-2000:]}"
    assert len(outcomes) == count
    return outcomes


def check(kind, first, count, folder):
    outcomes = open_damaged(kind, first, count, folder)
    odd = [line for line in outcomes if line.split(" ", 1)[1] not in ("loaded", "refused")]
    assert not odd, f"{kind}: {odd[:10]}"
    refused = sum(line.endswith("refused") for line in outcomes)
    assert refused > 0, f"{kind}: all {count} damaged files loaded"


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_load_or_are_refused(tmp_path, kind):
    check(kind, FIRST_SEED, 60, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_many_damaged_files_load_or_are_refused(tmp_path, kind, part):
    """12,800 in all."""
    check(kind, FIRST_SEED + 1000 + 400 * part, 400, tmp_path)
