"""Chat templates: messages to one prompt text. The template is untrusted, and so is what users write."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .files import ModelError, read_json, read_text
from .gguf_file import GGUFFile
from .model_files import gguf_path
from .tokenizer import BREAK, Tokenizer, check_text

ROLES = ("system", "user", "assistant", "tool")
MAX_TEMPLATE = 1 << 18  # bytes
MAX_MESSAGES = 1 << 22  # characters of all contents
MAX_SECONDS = 5.0


class ChatError(ValueError):
    """Messages or a template cannot be rendered."""


class ChatTemplate:
    """A model's template. Rendering is bounded in time and memory; a control string in a message stays text."""

    def __init__(self, source: str, tokenizer: Tokenizer, max_seconds: float = MAX_SECONDS) -> None:
        self.source, self.max_seconds = source, max_seconds
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        self._tokens = {name: "" if i is None else tokenizer.token_string(i) for name, i in ids.items()}
        strings = "|".join(map(re.escape, tokenizer.control)) or r"(?!)"
        self._starts = re.compile(f"(?={strings}).", re.DOTALL)
        self._worker = Worker()

    @classmethod
    def load(cls, path: str | Path, tokenizer: Tokenizer) -> ChatTemplate:
        """From chat_template.jinja, tokenizer_config.json or a GGUF file. Raises ModelError where there is none."""
        return cls(template_source(Path(path)), tokenizer)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt, for `Tokenizer.encode_chat`. Raises ChatError."""
        values = {
            "messages": [{"role": m["role"], "content": self._defused(m["content"])} for m in checked(messages)],
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
            **self._tokens,
        }
        return self._worker.render({"template": self.source, "values": values}, self.max_seconds)

    def _defused(self, content: str) -> str:
        """A BREAK after the first character of every control string that a message holds."""
        return self._starts.sub(lambda start: start[0] + BREAK, content)


def checked(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Refuse anything but a non-empty list of {role, content} with known roles and valid text."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ChatError("messages must be a list of at least one message")
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise ChatError(f"{where} must have exactly the keys role and content")
        if message["role"] not in ROLES:
            raise ChatError(f"{where}.role is {message['role']!r}, must be {' or '.join(ROLES)}")
        try:
            check_text(message["content"], f"{where}.content")
        except ValueError as error:
            raise ChatError(str(error)) from error
    if (total := sum(len(m["content"]) for m in messages)) > MAX_MESSAGES:
        raise ChatError(f"messages have {total} characters, may have at most {MAX_MESSAGES}")
    return messages


def template_source(path: Path) -> str:
    """The default template of a directory or a GGUF file."""
    if gguf := gguf_path(path):
        return _checked_template(gguf, GGUFFile.open(gguf).metadata.get("tokenizer.chat_template"), path)
    if (path / "chat_template.jinja").is_file():
        return read_text(path / "chat_template.jinja", MAX_TEMPLATE)
    file = path / "tokenizer_config.json"
    template = read_json(file).get("chat_template") if file.is_file() else None
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
        if template is None:
            raise ModelError(f"{file}: chat_template names {sorted(map(str, named))}, none of them is default")
    return _checked_template(file, template, path)


def _checked_template(file: Path, template: object, path: Path) -> str:
    if template is None:
        raise ModelError(f"{path} has no chat template; give a prompt instead of messages")
    if not isinstance(template, str) or len(template.encode()) > MAX_TEMPLATE:
        raise ModelError(f"{file}: chat_template must be a string of at most {MAX_TEMPLATE} bytes")
    return template


class Worker:
    """The rendering process: started at the first use, again after it had to be stopped, ended with its owner."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._end: Callable[[], object] = lambda: None
        self._lock = threading.Lock()

    def render(self, request: Mapping[str, Any], max_seconds: float) -> str:
        with self._lock:
            process = self._process or self._start()
            late = threading.Event()

            def stop() -> None:
                late.set()
                process.kill()

            timer = threading.Timer(max_seconds, stop)
            timer.start()
            reply = ""
            try:
                reply = _ask(process, json.dumps(request))
            finally:  # also when interrupted: the reply still to come would be taken for the next one's
                timer.cancel()
                timer.join()
                if late.is_set() or not reply:
                    self._stop()
        if not reply:
            raise ChatError(f"chat template was stopped: it ran longer than {max_seconds:g} s, or crashed")
        answer = json.loads(reply)
        if "error" in answer:
            raise ChatError(f"chat template {answer['error']}")
        return str(answer["text"])

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-I", str(Path(__file__).with_name("chat_worker.py"))]
        # In a session of its own: Ctrl-C at the terminal ends an answer, not what renders the next question.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._end = weakref.finalize(self, _end, self._process)
        return self._process

    def _stop(self) -> None:
        self._end()
        self._process = None


def _ask(process: subprocess.Popen[str], request: str) -> str:
    """The reply's line; empty where the process has died."""
    assert process.stdin
    assert process.stdout
    try:
        process.stdin.write(request + "\n")
        process.stdin.flush()
        return process.stdout.readline()
    except BrokenPipeError:
        return ""


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):  # what could not be written is still buffered
            if pipe:
                pipe.close()
