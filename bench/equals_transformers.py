"""Greedy text of a GGUF file by lychee and by transformers in fp32 from the same file dequantised, token by token.

    python -m bench.equals_transformers FILE.gguf [--prompts 10] [--max-tokens 100] [--json FILE]

Needs the packages transformers, accelerate and gguf. Prompts are questions under the file's chat template. Where the
texts part, `margin` is transformers' logit of its own token less that of lychee's: below 1e-3 the two are a near tie,
which rounding decides. `none` are the weights as floats, `file` as the file has them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.parser import Parser
from lychee import LLM, ModelError, ParameterError, SamplingParams
from lychee.models.chat import ChatError
from lychee.models.model_files import FLOATS

NEAR_TIE = 1e-3
OWN = "file"
PROMPTS = (
    "What is the capital of France?",
    "Explain in simple words why the sky is blue.",
    "Write a short poem about a river in autumn.",
    "Write a Python function that reverses a string.",
    "List five things to pack for a camping trip.",
    "How do I boil an egg?",
    "Who wrote Romeo and Juliet, and what is it about?",
    "What is 17 times 6? Show the steps.",
    "Give me three ideas for a birthday present for my grandmother.",
    "Summarise the story of Cinderella in two sentences.",
)


@dataclass(frozen=True)
class Found:
    """`first_differing` is None where the texts are identical; `margin` is transformers'."""

    weights: str
    prompt: str
    num_tokens: int
    first_differing: int | None = None
    ours: str | None = None
    theirs: str | None = None
    margin: float | None = None

    @property
    def near_tie(self) -> bool:
        return self.margin is not None and abs(self.margin) < NEAR_TIE


def transformers_model(file: Path) -> Any:
    """In fp32. Raises ImportError naming what is missing."""
    try:
        import accelerate  # noqa: F401 - transformers reads GGUF files through these two
        import gguf  # noqa: F401
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ImportError(f"needs the packages transformers, accelerate and gguf: {error}") from error
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # texts go on past their ends, as lychee's do here
    return model


@torch.inference_mode()
def continuation(model: Any, prompt: Sequence[int], length: int) -> list[int]:
    """Greedy tokens."""
    ids = torch.tensor([list(prompt)], device=model.device)
    made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length)
    return made[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@torch.inference_mode()
def margin(model: Any, tokens: Sequence[int], theirs: int, ours: int) -> float:
    """By how much transformers' logit of `theirs` after these tokens exceeds that of `ours`."""
    logits = model(torch.tensor([list(tokens)], device=model.device)).logits[0, -1].double()
    return float(logits[theirs] - logits[ours])


def compare(args: argparse.Namespace) -> Iterator[Found]:
    model = transformers_model(args.file)
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    expected: dict[int, list[int]] = {}
    for weights in args.weights:
        llm = LLM(args.file, target_quant=None if weights == OWN else weights, max_num_seqs=1, device="cpu")
        for number, question in enumerate(PROMPTS[: args.prompts]):
            prompt = llm.encode_chat([{"role": "user", "content": question}])
            ours = llm.generate([prompt], params, native=True)[0].outputs[0].token_ids
            if number not in expected:
                expected[number] = continuation(model, prompt, args.max_tokens)
            theirs, found = expected[number], Found(weights, question, len(ours))
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
            if at is not None:
                gap = margin(model, [*prompt, *theirs[:at]], theirs[at], ours[at])
                spelled = llm.tokenizer.token_string
                found = replace(
                    found, first_differing=at, ours=spelled(ours[at]), theirs=spelled(theirs[at]), margin=gap
                )
            yield found


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help=f"up to {len(PROMPTS)}")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument(
        "--weights", nargs="+", default=[FLOATS, OWN], help="none, file, int8, ... (default: none file)"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if not args.file.is_file():
        parser.error(f"there is no file {args.file}")
    if not 1 <= args.prompts <= len(PROMPTS):
        parser.error(f"--prompts is {args.prompts}, must be from 1 to {len(PROMPTS)}")
    table = Table("weights", "prompt", "tokens", "result", "margin", box=None)
    found = []
    try:
        for one in compare(args):
            found.append(one)
            result = "identical"
            if one.first_differing is not None:
                near = ", a near tie" if one.near_tie else ""
                result = f"token {one.first_differing}: {one.ours!r}, transformers {one.theirs!r}{near}"
            gap = "" if one.margin is None else f"{one.margin:.2g}"
            table.add_row(one.weights, one.prompt, str(one.num_tokens), result, gap)
    except (ImportError, ModelError, ParameterError, ChatError) as error:
        parser.error(str(error))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    for weights in args.weights:
        same = [one for one in found if one.weights == weights]
        print(f"{weights}: {sum(one.first_differing is None for one in same)} of {len(same)} identical")
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
