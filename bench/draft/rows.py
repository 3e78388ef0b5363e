"""The sequences that are being written, and how long they may get."""

from __future__ import annotations

from dataclasses import dataclass, field

from .prompts import Prompt, Turns


@dataclass(frozen=True)
class Limits:
    """How much is written."""

    positions: int = 512
    """The longest sequence."""
    answer: int = 256
    question: int = 96


@dataclass
class Row:
    """A sequence in the making."""

    prompt: Prompt
    ids: list[int]
    part: int = 0
    """Which of the prompt's parts is being written."""
    length: int = 0
    """How much of that part there is."""
    given: list[int] = field(default_factory=list)
    """Template tokens that come before the next part."""
    own: list[int] = field(default_factory=list)
    """The places of the tokens that the target wrote, less those of questions: no draft has to foresee them."""
    top: list[tuple[list[int], list[float]]] = field(default_factory=list)
    """The distribution that each of those was drawn from."""

    def temperature(self) -> float:
        """That of the part being written."""
        return 1.0 if self.prompt.writes[self.part] == "user" else self.prompt.temperature

    def push(
        self, token: int, top: tuple[list[int], list[float]], ends: list[int], turns: Turns, limits: Limits
    ) -> bool:
        """Take the token that was drawn, or the template's instead; returns whether the sequence is done."""
        if self.given:
            self.ids.append(self.given.pop(0))
            return len(self.ids) >= limits.positions
        writes = self.prompt.writes
        if writes[self.part] != "user":
            self.own.append(len(self.ids))
            self.top.append(top)
        self.ids.append(token)
        self.length += 1
        if token in ends:
            self.part += 1
            if self.length < 2 or self.part == len(writes):
                return True
            self.length, self.given = 0, list(turns.to_user if writes[self.part] == "user" else turns.to_assistant)
        limit = limits.question if self.part < len(writes) and writes[self.part] == "user" else limits.answer
        return self.length >= limit or len(self.ids) >= limits.positions
