"""The command: what it refuses, and a process that listens, answers and ends on SIGTERM."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from bench.serve_load import start
from lychee import demo, serve
from lychee.serve import cli
from tests.serve.running import PLAIN_CHAT, native
from tests.test_layers import imported, modules


@pytest.fixture
def refused(capsys, monkeypatch):
    """The sentence with which the command refuses its options; it loads no model for that."""
    monkeypatch.setattr(cli, "load", lambda *_: pytest.fail("a model is loaded"))

    def call(*argv):
        assert serve.main([*argv]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("lychee serve: ")
        return err

    return call


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--port", "70000"], "--port"),
        (["--max-body", "0"], "--max-body"),
        (["--requests-per-minute", "0"], "--requests-per-minute"),
        (["--queue-timeout", "0"], "--queue-timeout"),
        (["--stall-timeout", "-1"], "--stall-timeout"),
        (["--max-queue", "-1"], "--max-queue"),
        (["--api-key-file", "/nowhere/keys"], "/nowhere/keys"),
        (["some/model"], "some/model"),
        (["--unknown"], "--unknown"),
        (
            ["--port", "0", "--goodput-margin", "0.2"],
            "--goodput-margin has no use with a --speculation-share of 0",
        ),
        (["--port", "0", "--max-draft-len", "0", "--speculation-share", "0.5"], "--speculation-share has no use with"),
        (["--port", "0", "--max-draft-len", "0", "--tree", "auto"], "tree is 'auto', must be left out where max_draft"),
    ],
)
def test_what_it_cannot_use_is_said_in_a_sentence(refused, argv, word):
    assert word in refused(*argv)


def test_only_a_model_with_a_chat_template_or_one_that_is_given_has_chats(tmp_path):
    (tmp_path / "plain.jinja").write_text(PLAIN_CHAT)
    assert cli._chat(argparse.Namespace(chat_template=None), demo.TARGET, native()) is None
    given = cli._chat(argparse.Namespace(chat_template=tmp_path / "plain.jinja"), demo.TARGET, native())
    assert given.source == PLAIN_CHAT


def test_a_file_without_keys_is_refused_rather_than_taken_for_none(refused, tmp_path):
    (tmp_path / "keys").write_text("\n\n")
    assert "holds no key" in refused("--api-key-file", str(tmp_path / "keys"))


def test_a_port_in_use_is_said_before_the_model_is_loaded(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "in use" in refused("--port", str(taken.getsockname()[1]))


def test_a_missing_extra_is_named(monkeypatch, capsys):
    for name in ("cli", "server"):
        monkeypatch.delitem(sys.modules, f"lychee.serve.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert serve.main([]) == 2
    out, err = capsys.readouterr()
    assert (out, "lychee-decode[serve]" in err) == ("", True)


def test_only_the_command_imports_the_extra():
    """lychee.serve itself imports its modules when it is called, and no one else imports them."""
    for path, module, is_package in modules():
        if not module.startswith("lychee.serve."):
            found = set(imported(path.read_text(), module, is_package))
            assert not {name.split(".")[0] for name in found} & {*serve.EXTRA}
            below = {name for name in found if name.startswith("lychee.serve.")}
            assert below == ({"lychee.serve.cli.main"} if module == "lychee.serve" else set())


@pytest.mark.parametrize("ending", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_the_process_listens_here_alone_and_ends_clean_on_a_signal(ending, tmp_path):
    server, port = start([], tmp_path / "log")
    try:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
            with connection.makefile("rb") as answer:
                assert answer.readline() == b"HTTP/1.1 200 OK\r\n"
            listening = subprocess.run(["cat", f"/proc/{server.pid}/net/tcp"], capture_output=True, text=True).stdout
            assert f"0100007F:{port:04X}" in listening
            assert f"00000000:{port:04X}" not in listening
            os.kill(server.pid, ending)
            assert server.wait(60) == 0
    finally:
        server.kill()
        server.stdout.close()
    (entry,) = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert (entry["path"], entry["status"], entry["key"]) == ("/v1/models", 200, "anonymous")
