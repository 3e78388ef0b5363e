"""The corpus: LibreOffice Help in English and Chinese, Python's documentation, and Python's library and tests.

All of it comes out of Debian packages. A document is a page of help or a module; each kind of text is a list of them.
"""

from __future__ import annotations

import hashlib
import html
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

PACKAGES = (
    "libreoffice-help-en-us", "libreoffice-help-zh-cn", "python3.11-doc",
    "libpython3.11-minimal", "libpython3.11-stdlib", "libpython3.11-testsuite",
)  # fmt: skip
KINDS = ("en", "zh", "code")
HELD_OUT_PERCENT = 4
TEST_BYTES = 2_400_000
"""How much of CPython's test suite to take: the modules richest in assertions come first."""

Documents = dict[str, list[str]]


def fetch(folder: Path) -> Path:
    """Download and unpack the packages below ``folder`` where they are not there yet; return where they lie."""
    for tool in ("apt-get", "dpkg"):
        if not shutil.which(tool):
            raise SystemExit(f"{tool} is missing: elsewhere than on Debian, give the packages by --unpacked")
    for package in PACKAGES:
        place = folder / package
        if place.exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        if subprocess.run(["apt-get", "download", "-q", package], cwd=folder).returncode:
            raise SystemExit(f"apt-get could not download {package}; Debian 12 has it: try `apt-get update`")
        archive = next(folder.glob(f"{package}_*.deb"))
        unfinished = folder / f"{package}.part"
        subprocess.run(["dpkg", "-x", archive, unfinished], check=True)
        unfinished.rename(place)
    return folder


def build(unpacked: Path) -> tuple[Documents, Documents]:
    """The training and the held-out documents of each kind, from packages as ``dpkg -x`` leaves them."""
    missing = [p for p in PACKAGES if not (unpacked / p).is_dir()]
    if missing:
        raise SystemExit(f"{unpacked} lacks the folders {', '.join(missing)}, one for each unpacked package")
    raw: dict[str, Iterable[str]] = {
        "en": chain(
            office_help(unpacked / "libreoffice-help-en-us", is_english),
            python_docs(unpacked / "python3.11-doc"),
        ),
        "zh": office_help(unpacked / "libreoffice-help-zh-cn", is_chinese),
        "code": python_code(unpacked),
    }
    train: Documents = {}
    held: Documents = {}
    for kind, documents in raw.items():
        whole = dict.fromkeys(d.strip("\n") for d in documents)
        train[kind] = [d for d in whole if len(d) > 200 and not is_held_out(d)]
        held[kind] = [d for d in whole if len(d) > 200 and is_held_out(d)]
    return train, held


def is_held_out(document: str) -> bool:
    """Whether a document is kept from training: decided by its text alone, so it is the same in every run."""
    return int(hashlib.sha1(document.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


def office_help(package: Path, wanted: Callable[[str], bool]) -> Iterator[str]:
    """The pages of LibreOffice Help, a paragraph a line."""
    for path in sorted(package.rglob("*.html")):
        found = re.search(r'<div id="DisplayArea"[^>]*>(.*)', path.read_text(encoding="utf-8"), re.S)
        if found:
            body = re.sub(r"<(script|style|nav|footer|pre)\b.*?</\1>", "", found[1], flags=re.S)
            body = re.split(r'<div id="Donate|<div class="donation|<footer|<aside|<div id="DonationFrame', body)[0]
            yield paragraphs(body, wanted)


def python_docs(package: Path) -> Iterator[str]:
    """The pages of Python's documentation, less indices, change logs and licences; a paragraph a line."""
    root = package / "usr/share/doc/python3.11/html"
    for part in ("tutorial", "library", "howto", "faq", "reference", "extending", "c-api", "using", "whatsnew"):
        for path in sorted((root / part).glob("*.html")):
            text = path.read_text(encoding="utf-8")
            if path.stem in ("index", "changelog") or '<div class="body" role="main">' not in text:
                continue
            body = text.split('<div class="body" role="main">', 1)[1].split('<div class="sphinxsidebar"', 1)[0]
            body = re.sub(r'<a class="headerlink".*?</a>|<span class="section-number">.*?</span>', "", body, flags=re.S)
            body = re.sub(r"<(script|style|pre|dt)\b.*?</\1>", "", body, flags=re.S)
            body = body.translate({0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2014: "-", 0x2013: "-"})
            yield paragraphs(body, is_english)


def paragraphs(body: str, wanted: Callable[[str], bool]) -> str:
    """The text of a piece of HTML: the wanted paragraphs, none twice in a row."""
    body = re.sub(r"<!--.*?-->", "", body, flags=re.S)
    body = re.sub(r"\s*\n\s*", " ", body)
    body = re.sub(r"<(p|h\d|li|tr|div|br|td|th)\b[^>]*>", "\n", body)
    kept: list[str] = []
    for line in html.unescape(re.sub(r"<[^>]+>", "", body)).split("\n"):
        line = re.sub(r"[ \t\u00a0]+", " ", line).strip()
        if line and kept[-1:] != [line] and wanted(line):
            kept.append(line)
    return "\n".join(kept)


def is_chinese(line: str) -> bool:
    """Whether a paragraph is for the most part Chinese, and no call for donations."""
    share = len(re.findall(r"[\u4e00-\u9fff]", line)) / len(line)
    return share >= 0.25 and "请支持我们" not in line and "捐赠" not in line


def is_english(line: str) -> bool:
    """Whether a paragraph is prose, and no call for donations."""
    share = sum(c.isalpha() or c == " " for c in line) / len(line)
    return len(line) > 3 and share > 0.8 and "donat" not in line.lower()


def python_code(unpacked: Path) -> Iterator[str]:
    """The modules of Python's library, and as much of its test suite as ``TEST_BYTES`` allows."""
    for package in ("libpython3.11-minimal", "libpython3.11-stdlib"):
        library = unpacked / package / "usr/lib/python3.11"
        for path in sorted(library.rglob("*.py")):
            if not re.search(r"pydoc_data|encodings|lib2to3/(tests|fixes)|/_sysconfigdata|turtledemo", str(path)):
                yield module(path)
    tests = unpacked / "libpython3.11-testsuite/usr/lib/python3.11/test"
    cases = [t for t in map(module, sorted(tests.rglob("test_*.py"))) if len(t) > 2000]
    cases.sort(key=lambda t: -len(re.findall(r"self\.assert", t)) / len(t))
    size = 0
    for text in cases:
        size += len(text)
        if size > TEST_BYTES:
            return
        yield text


def module(path: Path) -> str:
    """A module less the lines that are only a comment; nothing where it is full of numbers or other odd text."""
    lines = path.read_text(encoding="utf-8", errors="ignore").expandtabs(4).split("\n")
    lines = [line.rstrip() for line in lines if not line.lstrip().startswith("#")]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines))
    foreign, digits = sum(ord(c) > 127 for c in text), sum(map(str.isdigit, text))
    return "" if max(map(len, lines)) > 160 or foreign > 20 or digits > 0.02 * len(text) else text
