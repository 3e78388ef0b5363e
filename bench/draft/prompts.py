"""Prompts for the target to answer: its own questions, templates filled with topics, and beginnings of texts."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from lychee.models.chat import ChatTemplate
from lychee.models.tokenizer import Tokenizer

from .subjects import Sections, fill, sections

HELD_OUT_PERCENT = 6
SEVERAL_TURNS = 0.12
"""Share of the conversations that have two answers."""
SHARES = {
    "ask": 30, "explain": 18, "compare": 3, "story": 7, "cook": 3, "letter": 3, "translate": 2, "rework": 6, "sums": 3,
    "function": 9, "read_code": 4, "code": 5, "opening": 7, "document": 3, "prose": 4,
}  # fmt: skip
CODE = ("function", "read_code", "code")
PROSE = ("opening", "document", "prose")


@dataclass(frozen=True)
class Prompt:
    """What the target is given, and the parts that it is to write after it."""

    kind: str
    held: bool
    ids: list[int]
    writes: list[str]
    """The parts in turn: ``user`` (a question), ``assistant`` (an answer) or ``text`` (a document goes on)."""
    temperature: float
    """Of answers and texts; a question is drawn at temperature 1."""


@dataclass(frozen=True)
class Turns:
    """The token ids that a chat template puts around what is said."""

    before_user: list[int]
    to_assistant: list[int]
    to_user: list[int]

    @classmethod
    def of(cls, chat: ChatTemplate, tokenizer: Tokenizer, ends: list[int]) -> Turns:
        """Found by rendering a conversation of marks. The end-of-turn token, which the model writes, is left out."""
        said = [{"role": role, "content": f"<{role}{n}>"} for n, role in enumerate(("user", "assistant", "user"))]
        before, rest = chat.render(said).split("<user0>")
        middle, rest = rest.split("<assistant1>")
        between, _ = rest.split("<user2>")
        parts = [tokenizer.encode_chat(part) for part in (before, middle, between)]
        return cls(parts[0], *(ids[1:] if ids[:1] and ids[0] in ends else ids for ids in parts[1:]))


def is_held_out(about: str) -> bool:
    """Whether prompts about this are kept from training: decided by the words alone."""
    return int(hashlib.sha1(about.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


def build(chat: ChatTemplate, tokenizer: Tokenizer, ends: list[int], lists: Sections, count: int,
          seed: int) -> Iterator[Prompt]:  # fmt: skip
    """``count`` prompts of all kinds, mixed. Words that were used before are not answered greedily again."""
    rng, turns, forms = random.Random(seed), Turns.of(chat, tokenizer, ends), sections("forms.txt", "\n")
    seen: set[str] = set()
    for number, style in enumerate(rng.choices(list(SHARES), list(SHARES.values()), k=count)):
        kind = "code" if style in CODE else "prose" if style in PROSE else "chat"
        temperature = 0.0 if rng.random() < 0.5 else rng.uniform(0.5, 1.0)
        writes = ["assistant", "user", "assistant"] if rng.random() < SEVERAL_TURNS else ["assistant"]
        text, about = "", f"{seed} {number}"
        if style in ("ask", "document"):
            ids = turns.before_user if style == "ask" else document_start(tokenizer) or turns.before_user[:1]
            writes = ["user", *writes] if style == "ask" else ["text"]
            temperature = temperature if style == "ask" else rng.uniform(0.7, 1.0)
        else:
            text, about = fill(style, rng, lists, forms)
            raw = kind == "prose" or style == "code"
            said = [{"role": "user", "content": text}]
            ids = tokenizer.encode(text) if raw else tokenizer.encode_chat(chat.render(said))
            writes = ["text"] if raw else writes
            temperature = rng.uniform(0.5, 1.0) if text in seen else temperature
            seen.add(text)
        yield Prompt(kind, is_held_out(about), ids, writes, temperature)


def document_start(tokenizer: Tokenizer) -> list[int]:
    """What stands before a document in pre-training, where the vocabulary has it."""
    ids = tokenizer.encode_chat("<|endoftext|>")
    return ids if len(ids) == 1 else []


def write(prompts: Iterator[Prompt], path: Path) -> int:
    """One prompt a line; returns how many."""
    lines = [json.dumps(asdict(p)) + "\n" for p in prompts]
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def read(path: Path) -> list[Prompt]:
    """What ``write`` wrote."""
    with path.open(encoding="utf-8") as lines:
        return [Prompt(**json.loads(line)) for line in lines]
