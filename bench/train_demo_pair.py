"""Train the packaged model pair from nothing: a small Llama and a draft of a tenth of its size.

Fetches the corpus from Debian's package archive (or takes packages that are already unpacked), trains the target on
it and then the draft by distillation on the same text. Both end as ordinary Hugging Face model directories. Lengths
are counted in tokens, never in time, so a slow or paused machine gives the same pair; a run that was stopped goes on
from its last checkpoint when the same command is given again.

    python bench/train_demo_pair.py --work build/pair --out lychee/demo --tokenizer lychee/demo/target/tokenizer.model
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
import torch
from demo_pair import corpus, tokenizer
from demo_pair.files import load
from demo_pair.loop import train
from demo_pair.model import DRAFT, TARGET, Llama


def from_teacher(teacher: Llama, seed: int) -> Llama:
    """A fresh draft whose embedding is the principal directions of the target's."""
    torch.manual_seed(seed)
    draft = Llama(DRAFT)
    u, s, _ = torch.linalg.svd(teacher.embedding.detach().float(), full_matrices=False)
    main = u[:, : DRAFT.hidden_size] * s[: DRAFT.hidden_size]
    with torch.no_grad():
        draft.embedding.copy_(main / main.std() * 0.05)
    return draft


def arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--work", type=Path, required=True, help="folder for the corpus and the checkpoints")
    add("--out", type=Path, required=True, help="folder in which target/ and draft/ are written")
    add("--unpacked", type=Path, help="folder of the Debian packages as `dpkg -x` unpacks them (default: fetch them)")
    add("--tokenizer", type=Path, help="a sentencepiece model of 4,096 pieces (default: train one)")
    add("--target-tokens", type=float, default=8.192e6, metavar="N", help="training tokens of the target (%(default)g)")
    add("--draft-tokens", type=float, default=13.9264e6, metavar="N", help="training tokens of the draft (%(default)g)")
    add("--mix", default="0.42,0.22,0.36", help="target: shares of English, Chinese and code (%(default)s)")
    add("--draft-mix", default="0.28,0.24,0.48", help="the same for the draft (%(default)s)")
    add("--cooldown", type=float, default=0.45, help="share of steps in which the learning rate falls (%(default)s)")
    add("--long", type=float, default=0.2, help="share of the steps, the last, at the full context (%(default)s)")
    add("--plain", type=float, default=0.21, help="share of the draft's steps before it is distilled (%(default)s)")
    add("--temperature", type=float, default=0.7, help="temperature of the distillation (%(default)s)")
    add("--save-every", type=int, default=200, metavar="STEPS", help="steps between checkpoints (%(default)s)")
    add("--stop-after", choices=("corpus", "target", "draft"), default="draft", help="last stage to run (%(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda (here: %(default)s)")
    add("--no-compile", dest="compile", action="store_false", help="no torch.compile: slower, needs no C++ compiler")
    add("--seed", type=int, default=0, help="seed of the weights and of the order of the text (%(default)s)")
    o = parser.parse_args()
    for name in ("mix", "draft_mix"):
        try:
            shares = [float(x) for x in getattr(o, name).split(",")]
        except ValueError:
            shares = []
        if len(shares) != 3 or min(shares) < 0 or abs(sum(shares) - 1) > 0.005:
            parser.error(f"--{name.replace('_', '-')} needs three shares that add up to 1, such as 0.4,0.2,0.4")
        setattr(o, name, dict(zip(corpus.KINDS, shares, strict=True)))
    for name in ("target_tokens", "draft_tokens", "temperature", "save_every"):
        if getattr(o, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be more than 0")
    for name in ("cooldown", "long", "plain"):
        if not 0 <= getattr(o, name) <= 1:
            parser.error(f"--{name} is a share: give a number from 0 to 1")
    for name in ("unpacked", "tokenizer"):
        if getattr(o, name) and not getattr(o, name).exists():
            parser.error(f"--{name}: there is no {getattr(o, name)}")
    if o.device not in ("cpu", "cuda") or (o.device == "cuda" and not torch.cuda.is_available()):
        parser.error(f"--device {o.device} cannot be used here")
    o.compile = o.compile and (o.device == "cuda" or shutil.which("g++") is not None)
    return o


def main() -> None:
    """Corpus, target, draft."""
    o = arguments()
    o.work.mkdir(parents=True, exist_ok=True)
    kept = o.work / "tokens.npz"
    learnt, o.tokenizer = o.tokenizer, o.work / "tokenizer.model"
    if not kept.exists():
        documents, held_documents = corpus.build(o.unpacked or corpus.fetch(o.work / "packages"))
        if learnt:
            shutil.copyfile(learnt, o.tokenizer)
        else:
            tokenizer.train(documents, o.tokenizer)
        np.savez(kept, **tokenizer.encode(o.tokenizer, documents, held_documents))  # type: ignore[arg-type]
    arrays = dict(np.load(kept))
    data, held = ({kind: arrays[f"{kind}_{part}"] for kind in corpus.KINDS} for part in ("train", "held"))
    print("tokens:", ", ".join(f"{name} {len(ids):,}" for name, ids in arrays.items()), flush=True)
    if o.stop_after == "corpus":
        return
    torch.manual_seed(o.seed)
    train(o, "target", Llama(TARGET), o.target_tokens, data, held, o.mix)
    if o.stop_after == "target":
        return
    target = load(o.out / "target").to(o.device).requires_grad_(False)
    train(o, "draft", from_teacher(target, o.seed), o.draft_tokens, data, held, o.draft_mix, target)


if __name__ == "__main__":
    main()
