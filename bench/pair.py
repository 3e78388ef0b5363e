"""What benches of one pair share: which models, how they are quantised, the prompts, and ratios over runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lychee import LLM, demo
from lychee.models.names import resolve_model
from lychee.runtime.config import SpeculativeConfig


def add_pair(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=str(demo.TARGET))
    parser.add_argument("--draft-model", default=str(demo.DRAFT))
    parser.add_argument("--target-quant")
    parser.add_argument("--draft-quant")
    parser.add_argument("--prompt-file", type=Path, help="prompts, one a line (default: the packaged ones)")
    parser.add_argument("--chat", action="store_true", help="prompts are users' messages")


def load(args: argparse.Namespace, config: SpeculativeConfig, **sizes: Any) -> LLM:
    """Raises ModelError or ParameterError."""
    quants = {"target_quant": args.target_quant, "draft_quant": args.draft_quant}
    return LLM(resolve_model(args.model), resolve_model(args.draft_model), config, **quants, **sizes)


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Of the file; else the packaged ones, a prompt of each kind by turns. Raises OSError or UnicodeDecodeError."""
    if args.prompt_file is None:
        return [prompt for some in zip(*demo.prompts().values(), strict=True) for prompt in some]
    return [line for line in args.prompt_file.read_text(encoding="utf-8").splitlines() if line.strip()]


def asked(llm: LLM, prompts: Sequence[str], args: argparse.Namespace) -> list[Any]:
    """The prompts, under the chat template with --chat."""
    return [llm.encode_chat([{"role": "user", "content": p}]) for p in prompts] if args.chat else list(prompts)
