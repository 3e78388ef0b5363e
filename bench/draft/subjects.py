"""What prompts are about: the topics and forms of two data files, and the prose and code of text files."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from pathlib import Path

TOPIC_OF = {
    "explain": "things", "compare": "pairs", "cook": "dishes", "letter": "letters", "rework": "paragraphs",
    "function": "functions", "opening": "things",
}  # fmt: skip
SUFFIXES = (".py", ".md", ".rst", ".txt")
LONGEST = 700
"""Characters of text that a prompt quotes at most."""

Sections = dict[str, list[str]]


def sections(file: str, separator: str) -> Sections:
    """The entries of each section of ``topics.txt`` or ``forms.txt``."""
    found: Sections = {}
    for section in Path(__file__).with_name(file).read_text(encoding="utf-8").split("\n[")[1:]:
        name, text = section.split("]", 1)
        found[name] = [e.strip().replace("\\n", "\n") for e in text.split(separator) if e.strip()]
    return found


def topics(folders: list[Path]) -> Sections:
    """The topics, with ``modules`` and ``prose`` from the files below the folders."""
    found = sections("topics.txt", ";")
    modules, prose = read_texts(folders)
    return {**found, "modules": modules or found["code"], "prose": prose or found["paragraphs"]}


def read_texts(folders: list[Path]) -> tuple[list[str], list[str]]:
    """Python modules; and paragraphs of documentation strings and of Markdown, reStructuredText and plain files."""
    modules: list[str] = []
    prose: list[str] = []
    for path in sorted(p for folder in folders for p in folder.rglob("*") if p.suffix in SUFFIXES):
        text = path.read_text(encoding="utf-8", errors="ignore") if path.is_file() else ""
        if path.suffix != ".py":
            prose += text.split("\n\n")
        elif 500 < len(text) < 200_000:
            modules.append(text)
            prose += docstrings(text)
    return modules, [p for p in dict.fromkeys(" ".join(p.split()) for p in prose) if is_prose(p)]


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph is long enough and nearly all letters."""
    return len(paragraph) > 120 and sum(c.isalpha() or c == " " for c in paragraph) > 0.9 * len(paragraph)


def docstrings(module: str) -> Iterator[str]:
    """The paragraphs of a module's documentation strings."""
    try:
        nodes = list(ast.walk(ast.parse(module)))
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield from (ast.get_docstring(node) or "").split("\n\n")


def excerpt(module: str, rng: random.Random) -> str:
    """Some lines of a module, from its beginning or from that of a function or class."""
    lines = module.split("\n")
    at = rng.choice([0, *(i for i, line in enumerate(lines) if line.startswith(("def ", "class ")))])
    return "\n".join(lines[at : at + rng.randrange(4, 16)])[:LONGEST]


def fill(style: str, rng: random.Random, lists: Sections, forms: Sections) -> tuple[str, str]:
    """The words of a prompt of one style, and the subject by which it is held out or not."""
    pick = {name: rng.choice(entries) for name, entries in lists.items()}
    if style == "prose":
        return " ".join(pick["prose"].split(" ")[: rng.randrange(8, 48)]), pick["prose"]
    if style == "code":
        return (excerpt(pick["modules"], rng), pick["modules"]) if rng.random() < 0.75 else (pick["code"], pick["code"])
    form = rng.choice(forms[style])
    if style == "sums":
        a, b, c = rng.randrange(20, 400), rng.randrange(2, 20), rng.randrange(2, 9)
        return form.format(a=a, b=b, c=c), f"{a} {b}"
    if style == "story":
        return form.format(pick["heroes"], pick["places"], pick["themes"]), pick["heroes"]
    if style == "translate":
        return form.format(pick["languages"], pick["sentences"]), pick["sentences"]
    if style == "read_code":
        return form.format(excerpt(pick["modules"], rng)), pick["modules"]
    section = "prose" if style == "rework" and rng.random() < 0.6 else TOPIC_OF[style]
    return form.format(pick[section][:LONGEST]), pick[section]
