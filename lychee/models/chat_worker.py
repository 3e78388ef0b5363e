"""Renders chat templates in a process of its own, which can be stopped and cannot take the engine's memory.

One JSON request per line on stdin, one JSON reply per line on stdout: {"text": ...} or {"error": ...}.
"""

from __future__ import annotations

import datetime
import json
import resource
import sys
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 1 << 30
MAX_TEXT = 1 << 24  # characters of a rendered prompt


@lru_cache
def compiled(source: str) -> Template:
    """In an environment that has what templates of Hugging Face models expect."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made.from_string(source)


def _tojson(value: Any, indent: int | None = None) -> str:
    """Without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def render(request: dict[str, Any]) -> dict[str, str]:
    try:
        text = compiled(request["template"]).render(request["values"])
    except MemoryError:
        return {"error": f"used more than {MEMORY_BYTES >> 20} MiB of memory"}
    except Exception as error:  # a template can raise anything
        return {"error": f"failed: {type(error).__name__}: {error}"}
    if len(text) > MAX_TEXT:
        return {"error": f"made {len(text)} characters, may make at most {MAX_TEXT}"}
    return {"text": text}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        print(json.dumps(render(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
