"""What all sides are given, and the machine that they run on."""

from __future__ import annotations

import json
import platform
from pathlib import Path

from lychee.models.chat import ChatTemplate
from lychee.models.tokenizer_files import load_tokenizer


def encoded(model: Path, file: Path) -> list[list[int]]:
    """Tokens of the prompts, each a user's message under the model's chat template."""
    tokenizer = load_tokenizer(model)
    template = ChatTemplate.load(model, tokenizer)
    texts = [prompt["text"] for prompt in json.loads(file.read_text())]
    return [tokenizer.encode_chat(template.render([{"role": "user", "content": text}])) for text in texts]


def processor() -> str:
    """The processor's name, and the widest of its vector instructions."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    except OSError:
        return platform.processor()
    lines = {key.strip(): value.strip() for key, value in lines.items()}
    flags = lines.get("flags", "").split()
    widest = next((flag for flag in ("amx_int8", "avx512_vnni", "avx512f", "avx2") if flag in flags), "")
    return f"{lines.get('model name', platform.processor())} {widest}".strip()
