"""Measure a trained pair on held-out text, with plain PyTorch and no engine: the numbers of its model card.

    python bench/demo_pair_quality.py --pair lychee/demo --work build/pair

``--work`` is the folder that ``bench/train_demo_pair.py`` worked in; it holds the corpus as tokens. (That script with
``--stop-after corpus`` makes the corpus alone.)
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from demo_pair.batches import held_windows
from demo_pair.corpus import KINDS
from demo_pair.files import load
from demo_pair.model import Llama, generate
from torch import Tensor

PROMPT, NEW = 48, 128


def perplexity(model: Llama, windows: Tensor) -> float:
    """Perplexity per token, each window read from its beginning."""
    losses = [F.cross_entropy(model(w[:, :-1]).flatten(0, 1), w[:, 1:].flatten()) for w in torch.split(windows, 8)]
    return float(torch.stack(losses).mean().exp())


def agreement(target: Llama, draft: Llama, windows: Tensor) -> float:
    """Share of the positions of held-out text where both models find the same token likeliest."""
    same = [target(w[:, :-1]).argmax(-1) == draft(w[:, :-1]).argmax(-1) for w in torch.split(windows, 8)]
    return float(torch.cat(same).float().mean())


def acceptance(target: Llama, draft: Llama, text: Tensor, temperature: float) -> float:
    """Mean probability with which a drafted token is accepted, at the positions that the target itself wrote."""
    p, q = (m(text[:, :-1])[:, PROMPT - 1 :] for m in (target, draft))
    if temperature == 0:
        return float((p.argmax(-1) == q.argmax(-1)).float().mean())
    return float(torch.minimum((p / temperature).softmax(-1), (q / temperature).softmax(-1)).sum(-1).mean())


def repeats(text: Tensor, size: int = 4) -> float:
    """Share of the runs of ``size`` tokens that stood in the same continuation before."""
    rows = text[:, PROMPT:].tolist()
    runs = [[tuple(row[i : i + size]) for i in range(len(row) - size + 1)] for row in rows]
    return 1 - sum(len(set(r)) for r in runs) / sum(map(len, runs))


def measure(target: Llama, draft: Llama, ids: np.ndarray, samples: int) -> Iterator[tuple[str, float]]:
    """All the numbers of one kind of text."""
    windows = held_windows(ids, min(40, (len(ids) - 1) // 512))
    yield "perplexity, target", perplexity(target, windows)
    yield "perplexity, draft", perplexity(draft, windows)
    yield "argmax agreement on the text", agreement(target, draft, windows)
    prompts = held_windows(ids, samples)[:, :PROMPT]
    for name, temperature in (("greedy", 0.0), ("temperature 0.7", 0.7)):
        text = generate(target, prompts, NEW, temperature)
        yield f"{name}: acceptance", acceptance(target, draft, text, temperature)
        yield f"{name}: repeated 4-grams", repeats(text)


def main() -> None:
    """Print one table, in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=Path, required=True, help="folder with target/ and draft/")
    parser.add_argument("--work", type=Path, required=True, help="folder of the training run, with tokens.npz")
    parser.add_argument("--samples", type=int, default=32, help="continuations written per kind (default: %(default)s)")
    o = parser.parse_args()
    for needed in (o.work / "tokens.npz", o.pair / "target/model.safetensors", o.pair / "draft/model.safetensors"):
        if not needed.exists():
            parser.error(f"there is no {needed}")
    if o.samples < 1:
        parser.error("--samples must be at least 1")
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    target, draft = load(o.pair / "target"), load(o.pair / "draft")
    held = np.load(o.work / "tokens.npz")
    table = {kind: dict(measure(target, draft, held[f"{kind}_held"], o.samples)) for kind in KINDS}
    sizes = target.parameter_count(), draft.parameter_count()
    print(f"parameters: target {sizes[0]:,}, draft {sizes[1]:,} ({sizes[1] / sizes[0]:.4f} of it)\n")
    print("| held-out text | English | Chinese | code |\n|---|---|---|---|")
    for name in table["en"]:
        form = "{:.1f}" if "perplexity" in name else "{:.3f}"
        print(f"| {name} |", " | ".join(form.format(table[kind][name]) for kind in KINDS), "|")


if __name__ == "__main__":
    main()
