"""The script that tries releases of Triton counts what pytest says, and does not take a failure for a pass."""

import subprocess

import pytest

from bench import triton_versions


@pytest.mark.parametrize(
    ("summary", "passed", "failed", "skipped"),
    [
        ("104 passed in 83.78s (0:01:23)", 104, 0, 0),
        ("1 failed, 103 passed, 2 skipped in 3.1s", 103, 1, 2),
        ("2 failed, 1 passed, 3 errors in 3.1s", 1, 5, 0),
        ("1 error in 0.2s", 0, 1, 0),
        ("no tests ran in 0.01s", 0, 0, 0),
    ],
)
def test_counts_are_read_from_pytests_last_line(summary, passed, failed, skipped):
    assert triton_versions.counts(summary) == {"passed": passed, "failed": failed, "skipped": skipped}


def test_a_release_that_cannot_be_installed_fails_the_run(monkeypatch, capsys):
    def refuse(*arguments):
        raise subprocess.CalledProcessError(1, "pip install")

    monkeypatch.setattr(triton_versions, "environment", refuse)
    assert triton_versions.main(["--versions", "0.0.1"]) == 1
    assert "0.0.1" in capsys.readouterr().out


@pytest.mark.parametrize(("failed", "code"), [(0, 0), (1, 1)])
def test_the_table_has_a_line_per_release(monkeypatch, capsys, failed, code):
    monkeypatch.setattr(
        triton_versions, "outcome", lambda version, _: triton_versions.Outcome(version, passed=5, failed=failed)
    )
    assert triton_versions.main(["--versions", "3.6.0,3.7.1"]) == code
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["triton", "passed", "failed", "skipped", "seconds"]
    assert [line.split()[:3] for line in lines] == [[version, "5", str(failed)] for version in ("3.6.0", "3.7.1")]
