"""The command line, called in process."""

import json

import pytest

from lychee import run


@pytest.fixture
def lychee(capsys, tmp_path):
    """Runs the command; returns its exit code, standard output, standard error and report."""

    def call(*argv, report=True):
        file = tmp_path / "report.json"
        file.unlink(missing_ok=True)
        code = run.main([*map(str, argv), *(["--report", str(file)] if report else [])])
        out, err = capsys.readouterr()
        return code, out, err, json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    return call
