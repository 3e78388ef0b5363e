"""What a run shows on the terminal while it goes on and at its end."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from rich.console import Console

from .report import Run, table
from .runtime.requests import Prompt


class Printer:
    """Prints several prompts' texts in order: the first unfinished one live, the others when their turn comes."""

    def __init__(self, prompts: Seq[Prompt], numbers: Seq[int] | None) -> None:
        """`numbers` are shown before the texts."""
        self.prompts, self.numbers = prompts, numbers
        self.texts = [""] * len(prompts)
        self.ended = [False] * len(prompts)
        self.turn = -1
        self._begin()

    def show(self, index: int, text: str, ended: bool) -> None:
        self.texts[index] += text
        self.ended[index] |= ended
        if index == self.turn:
            print(text, end="", flush=True)
        while self.turn < len(self.prompts) and self.ended[self.turn]:
            print(flush=True)
            self._begin()

    def _begin(self) -> None:
        self.turn += 1
        if self.turn < len(self.prompts):
            prompt = self.prompts[self.turn]
            if self.numbers is not None:
                print(f"[{self.numbers[self.turn]}] ", end="")
            print((prompt if isinstance(prompt, str) else "") + self.texts[self.turn], end="", flush=True)


def print_comparison(runs: Seq[Run], identical: bool | None) -> None:
    """The table of both runs, the speedup, and whether their tokens are identical."""
    Console().print(table(runs))
    print(f"speedup: {runs[0].wall_s / runs[1].wall_s:.2f} (native end-to-end time / speculative)")
    if runs[1].lossy:
        print("identical: null (lossy: with fallback_sampling=false the distribution is not native decoding's)")
    elif identical is None:
        print("identical: null (the distribution is kept; coupled acceptance, as with a --seed, keeps the tokens)")
    else:
        print(f"identical: {str(identical).lower()}")
        for place, a, b in zip(runs[0].places, *(r.completions for r in runs), strict=True):
            if a.token_ids != b.token_ids:
                at = next(i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if x != y)
                print(f"prompt {place + 1} differs from token {at + 1}")
