"""Prompts for the target to answer: its own questions, templates filled with topics, and beginnings of texts."""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from lychee.models.chat import ChatTemplate
from lychee.models.tokenizer import Tokenizer

HELD_OUT_PERCENT = 6
EXPLAIN = (
    "Explain {} in simple terms.", "What is {}?", "Tell me about {}.", "Why is {} important?", "Write a short essay about {}.",
    "Give me five facts about {}.", "How would you explain {} to a child?", "What are the advantages and disadvantages of {}?",
    "Write a poem about {}.", "Give me a list of ten ideas related to {}.", "What are some common misconceptions about {}?",
    "Write a dialogue between a teacher and a student about {}.", "Summarise the most important points about {}.",
    "I want to learn more about {}. Where should I start?", "Write a blog post about {}.", "What questions do people ask about {}?",
    "Describe {} in three sentences.", "Make a quiz with four questions about {}.", "Write a catchy title and a slogan about {}.",
)  # fmt: skip
COMPARE = ("Compare {}.", "What is the difference between {}?", "Which is better: {}? Give reasons.", "List the pros and cons of {}.")
STORY = ("Write a story about {} {} {}.", "Write the beginning of a tale about {} {} {}.", "Continue this story: There was once {} {} {}.")
COOK = ("Give me a recipe for {}.", "How do I make {}?", "What ingredients do I need for {}?", "Suggest a side dish for {} and say why.")
LETTER = ("Write an e-mail {}.", "Write a formal letter {}.", "Draft a short, friendly message {}.")
TRANSLATE = ("Translate into {}: {}", "How do you say this in {}? {}")
REWORK = (
    "Summarise this paragraph in one sentence: {}", "Rewrite the following text in simpler words: {}", "Continue this text: {}",
    "Give this text a title: {}", "Rewrite this more formally: {}", "What are the key facts in this text? {}",
    "Write three questions about this text: {}", "{}\n\nWhat happens next?", "Correct any mistakes in this text: {}",
)  # fmt: skip
FUNCTION = (
    "Write a Python function that {}.", "How can I write Python code that {}? Explain it step by step.", "Write a program that {}.",
    "Write a JavaScript function that {}.", "Write a Python function that {}, with a docstring and an example.",
)  # fmt: skip
READ_CODE = ("What does this code do?\n\n{}", "Explain this Python code:\n\n{}", "Add comments to this code:\n\n{}", "Improve this code:\n\n{}")
SUMS = (
    "A shop sells {a} apples for {b} dollars each. How much do they cost together?", "What is {a} plus {b} times {c}?",
    "A train travels {a} kilometres in {c} hours. What is its average speed?", "Tom has {a} marbles and gives {b} away. How many are left?",
    "If {c} workers need {a} days, how long do {b} workers need?", "A rectangle is {a} cm long and {b} cm wide. Find its area.",
    "What is {b} per cent of {a}?", "Solve for x: {c}x + {b} = {a}.",
)  # fmt: skip
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


def topics() -> dict[str, list[str]]:
    """The sections of ``topics.txt``."""
    found: dict[str, list[str]] = {}
    for section in Path(__file__).with_name("topics.txt").read_text(encoding="utf-8").split("\n[")[1:]:
        name, text = section.split("]", 1)
        found[name] = [entry.strip() for entry in text.split(";") if entry.strip()]
    return found


def is_held_out(about: str) -> bool:
    """Whether prompts about this are kept from training: decided by the words alone."""
    return int(hashlib.sha1(about.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


def read_texts(folders: list[Path]) -> tuple[list[str], list[str]]:
    """Python modules, and prose: paragraphs of documentation strings and of Markdown, reStructuredText and plain files."""
    modules: list[str] = []
    prose: list[str] = []
    for path in sorted(p for folder in folders for p in folder.rglob("*") if p.suffix in (".py", ".md", ".rst", ".txt")):
        text = path.read_text(encoding="utf-8", errors="ignore") if path.is_file() else ""
        if path.suffix != ".py":
            prose += text.split("\n\n")
        elif 500 < len(text) < 200_000:
            modules.append(text)
            prose += docstrings(text)
    whole = (" ".join(p.split()) for p in prose)
    return modules, list(dict.fromkeys(p for p in whole if 120 < len(p) and sum(c.isalpha() or c == " " for c in p) > 0.9 * len(p)))


def docstrings(module: str) -> Iterator[str]:
    """The paragraphs of a module's documentation strings."""
    try:
        nodes = list(ast.walk(ast.parse(module)))
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield from (ast.get_docstring(node) or "").split("\n\n")


def fill(style: str, rng: random.Random, lists: dict[str, list[str]]) -> tuple[str, str]:
    """A prompt of one style, and what decides whether it is held out."""
    pick = {name: rng.choice(entries) for name, entries in lists.items()}
    if style == "sums":
        a, b, c = rng.randrange(20, 400), rng.randrange(2, 20), rng.randrange(2, 9)
        return rng.choice(SUMS).format(a=a, b=b, c=c), f"{a} {b}"
    if style == "story":
        return rng.choice(STORY).format(pick["heroes"], pick["places"], pick["themes"]), pick["heroes"]
    if style == "translate":
        return rng.choice(TRANSLATE).format(pick["languages"], pick["sentences"]), pick["sentences"]
    if style == "opening":
        return f"{pick['openings']} {pick['things']}", pick["things"]
    if style in ("code", "read_code") and (style == "read_code" or rng.random() < 0.75):
        lines = pick["modules"].split("\n")
        at = rng.choice([0, *(i for i, line in enumerate(lines) if line.startswith(("def ", "class ")))])
        text = "\n".join(lines[at : at + rng.randrange(4, 16)])[:600]
        return (text if style == "code" else rng.choice(READ_CODE).format(text)), pick["modules"]
    if style == "code":
        return pick["code"], pick["code"]
    if style == "prose":
        words = pick["prose"].split(" ")
        return " ".join(words[: rng.randrange(8, 48)]), pick["prose"]
    names = {"explain": ("things", EXPLAIN), "compare": ("pairs", COMPARE), "cook": ("dishes", COOK),
             "letter": ("letters", LETTER), "rework": ("paragraphs", REWORK), "function": ("functions", FUNCTION)}  # fmt: skip
    section, forms = names[style]
    if style == "rework" and rng.random() < 0.6 and lists["prose"]:
        section = "prose"
    return rng.choice(forms).format(pick[section][:700]), pick[section]


def build(chat: ChatTemplate, tokenizer: Tokenizer, ends: list[int], folders: list[Path], count: int, seed: int) -> Iterator[Prompt]:
    """``count`` prompts of all kinds, mixed."""
    rng, turns, lists = random.Random(seed), Turns.of(chat, tokenizer, ends), topics()
    lists["modules"], lists["prose"] = (texts or lists["paragraphs"] for texts in read_texts(folders))
    styles = rng.choices(list(SHARES), list(SHARES.values()), k=count)
    seen: set[str] = set()
    for number, style in enumerate(styles):
        kind = "code" if style in CODE else "prose" if style in PROSE else "chat"
        temperature = 0.0 if rng.random() < 0.5 else rng.uniform(0.5, 1.0)
        writes = ["assistant", "user", "assistant"] if rng.random() < 0.12 else ["assistant"]
        if style == "ask":
            yield Prompt(kind, is_held_out(f"{seed} {number}"), turns.before_user, ["user", *writes], temperature)
        elif style == "document":
            start = tokenizer.encode("") or turns.before_user[:1]
            yield Prompt(kind, is_held_out(f"{seed} {number}"), document_start(tokenizer) or start, ["text"], rng.uniform(0.7, 1))
        else:
            text, about = fill(style, rng, lists)
            if text in seen:
                temperature = rng.uniform(0.5, 1.0)
            seen.add(text)
            if kind == "prose" or style == "code":
                ids, writes = tokenizer.encode(text), ["text"]
            else:
                ids = tokenizer.encode_chat(chat.render([{"role": "user", "content": text}]))
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
        return [Prompt(**json.loads(line)) for line in itertools.islice(lines, None)]
