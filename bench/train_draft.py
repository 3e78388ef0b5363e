"""Train a draft model for a target: the target writes text, and a few of its own layers learn to foresee it.

The draft shares the target's embedding, and its output has only the tokens that the target writes most. Four stages,
each of which goes on from the files of the last run when the same command is given again:

    prompts    what the target is asked: questions of its own, templates filled with topics, beginnings of texts
    generate   the target's text, each token with the distribution that it was drawn from
    train      distillation on that text
    measure    agreement on held-out prompts, and the model card

    python -m bench.train_draft --target MODEL --out DRAFT --hours 1

With several processes on one machine (`torchrun --nproc-per-node 2 -m bench.train_draft ... --stages train`) each takes
a share of every batch; `--part 0/2` and `--part 1/2` generate in two processes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from bench.draft import data, files, prompts, subjects
from bench.draft.card import Facts, card
from bench.draft.decoder import Decoder
from bench.draft.generate import generate
from bench.draft.net import Draft, agreement
from bench.draft.rows import Limits
from bench.draft.target import end_ids, load_target, own_parameters, read_config
from bench.draft.train import Counts, Plan, collate, table, train, workers
from bench.parser import Parser
from lychee.models.chat import ChatTemplate
from lychee.models.tokenizer_files import load_tokenizer

STAGES = ("prompts", "generate", "train", "measure")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--target", type=Path, required=True, help="Hugging Face directory of a Llama with tied embedding")
    add("--out", type=Path, required=True, help="folder of the draft")
    add("--work", type=Path, help="folder of prompts, texts and checkpoints (default: --out with .work appended)")
    add("--stages", default=",".join(STAGES), help="those to run (default: %(default)s)")
    add(
        "--texts",
        type=Path,
        nargs="*",
        default=[],
        metavar="DIR",
        help="folders of .py, .md, .rst and .txt files that the target continues (default: Python's library)",
    )
    add("--prompts", type=int, default=24_000, metavar="N", help="how many prompts to make (%(default)s)")
    add(
        "--hours",
        type=float,
        default=1.0,
        help="the target writes so long (%(default)s) or until there is WORK/text/stop",
    )
    add("--part", default="0/1", metavar="I/N", help="generate from every N-th prompt, from the I-th on (%(default)s)")
    add("--rows", type=int, default=192, help="texts that are written at once (%(default)s)")
    add("--positions", type=int, default=512, help="longest text (%(default)s)")
    add("--answer", type=int, default=256, metavar="N", help="tokens of an answer at most (%(default)s)")
    add("--layers", help="the target's layers to begin with (default: first, middle and last)")
    add("--start", type=Path, metavar="DIR", help="a finished draft to begin with, instead of the target's layers")
    add("--output-vocab", type=int, default=8192, metavar="N", help="output tokens of the draft (%(default)s)")
    add("--steps", type=int, help="training steps (default: four passes over the text)")
    add("--batch", type=int, default=16, metavar="ROWS", help="rows of --positions tokens in a batch (%(default)s)")
    add("--matrix-rate", type=float, default=Plan.matrix_rate, help="learning rate of the matrices (%(default)s)")
    add("--temperature", type=float, default=Plan.temperature, help="temperature of the distillation (%(default)s)")
    add("--save-every", type=int, default=50, metavar="STEPS", help="steps between checkpoints (%(default)s)")
    add("--name", help="the target's name in the card (default: its folder's)")
    add("--licence", default="unknown", help="the target's licence, for the card")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda (here: %(default)s)")
    add("--seed", type=int, default=0)
    o = parser.parse_args(argv)
    o.work = o.work or o.out.with_name(o.out.name + ".work")
    o.stages = o.stages.split(",")
    if not set(o.stages) <= set(STAGES):
        parser.error(f"--stages takes {', '.join(STAGES)}")
    if not (o.target / "config.json").exists():
        parser.error(f"--target: {o.target} is no model directory")
    count = read_config(o.target)["num_hidden_layers"]
    try:
        o.layers = [int(i) for i in o.layers.split(",")] if o.layers else sorted({0, count // 2, count - 1})
        o.part = [int(i) for i in o.part.split("/")]
    except ValueError:
        parser.error("--layers is a list such as 0,14,29 and --part a fraction such as 0/2")
    if not all(0 <= i < count for i in o.layers):
        parser.error(f"--layers: the target has the layers 0 to {count - 1}")
    o.command = command(sys.argv[1:] if argv is None else argv)
    return o


def command(flags: Sequence[str]) -> list[str]:
    """The command for the card: that of all stages in one process."""
    left_out = {i + more for i, flag in enumerate(flags) if flag in ("--stages", "--part") for more in (0, 1)}
    return ["python", "-m", "bench.train_draft", *(f for i, f in enumerate(flags) if i not in left_out)]


def make_prompts(o: argparse.Namespace) -> None:
    """The stage ``prompts``."""
    tokenizer = load_tokenizer(o.target)
    chat = ChatTemplate.load(o.target, tokenizer)
    lists = subjects.topics(o.texts or [Path(sysconfig.get_paths()["stdlib"])])
    made = prompts.build(chat, tokenizer, end_ids(o.target), lists, o.prompts, o.seed)
    kept = (p for p in made if len(p.ids) < o.positions // 2)
    print(f"{prompts.write(kept, o.work / 'prompts.jsonl'):,} prompts", flush=True)


def make_text(o: argparse.Namespace) -> None:
    """The stage ``generate``: goes on after the prompts that were taken up before."""
    part, parts = o.part
    out = data.Writer(o.work / "text", f"{part}of{parts}")
    tokenizer, ends = load_tokenizer(o.target), end_ids(o.target)
    turns = prompts.Turns.of(ChatTemplate.load(o.target, tokenizer), tokenizer, ends)
    mine = prompts.read(o.work / "prompts.jsonl")[part::parts][out.begun :]
    decoder = Decoder(load_target(o.target, o.positions).to(o.device), min(o.rows, max(1, len(mine))), o.positions)
    limits = Limits(o.positions, o.answer)
    generate(decoder, iter(mine), out, ends, turns, limits, o.work / "text/stop", o.hours * 3600, o.seed + part)


def outputs(o: argparse.Namespace, texts: list[data.Text]) -> tuple[np.ndarray, float]:
    """The draft's output ids, chosen once, and the share of the held-out text that they cover."""
    file, tokenizer = o.work / "output_ids.npy", load_tokenizer(o.target)
    size = read_config(o.target)["vocab_size"]
    if not file.exists():
        whole = [i for i in range(min(size, tokenizer.size)) if len(tokenizer.token_bytes(i)) == 1]
        known = [t for t in texts if not t.held]
        np.save(file, data.choose_outputs(known, size, min(o.output_vocab, size), [*end_ids(o.target), *whole]))
    ids = np.load(file)
    return ids, data.coverage([t for t in texts if t.held] or texts, ids)


def distil(o: argparse.Namespace) -> float:
    """The stage ``train``."""
    target = load_target(o.target, o.positions).to(o.device)
    texts = data.read(data.shards(o.work / "text"))
    if o.start:
        draft = files.load(o.start, target).train()
        np.save(o.work / "output_ids.npy", draft.output_ids.numpy())
    else:
        draft = Draft(target, o.layers, torch.from_numpy(outputs(o, texts)[0]))
    batch = o.batch * workers()[1] * o.positions
    steps = o.steps or max(1, 4 * sum(len(t.ids) for t in texts if not t.held) // batch)
    plan = Plan(steps, o.batch, o.positions, o.temperature, o.matrix_rate, save_every=o.save_every, seed=o.seed)

    def write(draft: Draft, step: int, counts: Counts) -> None:
        files.save(draft, read_config(o.target), end_ids(o.target), o.out)
        (o.work / "trained.json").write_text(json.dumps({"steps": step, "tokens": step * batch}), encoding="utf-8")
        describe(o, draft, counts)

    return train(draft, o.work / "text", plan, o.device, o.work / "draft.pt", write)


def describe(o: argparse.Namespace, draft: Draft, counts: Counts) -> None:
    """Write the card."""
    texts = data.read(data.shards(o.work / "text"))
    done = json.loads((o.work / "trained.json").read_text(encoding="utf-8"))
    facts = Facts(
        o.name or o.target.name, o.licence, o.command, o.layers, outputs(o, texts)[1], done["steps"], done["tokens"],
        own_parameters(o.target),
    )  # fmt: skip
    (o.out / "MODEL_CARD.md").write_text(card(draft, texts, counts, facts), encoding="utf-8")


def measure(o: argparse.Namespace) -> Counts:
    """The stage ``measure``: the written draft on all the held-out text."""
    draft = files.load(o.out, load_target(o.target, o.positions)).to(o.device)
    ids, rng = draft.output_ids.cpu().numpy(), np.random.default_rng(0)
    held = [t for t in data.read(data.shards(o.work / "text")) if t.held]
    rows = data.pack(held, ids, draft.net.shape.vocab_size, o.positions, rng)
    counts = agreement(draft, [collate(rows[i : i + 4]) for i in range(0, len(rows), 4)], o.device)
    print(f"held-out agreement: {table(counts)}", flush=True)
    describe(o, draft, counts)
    return counts


def main(argv: Sequence[str] | None = None) -> None:
    """The stages, in order."""
    o = arguments(argv)
    o.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(o.seed)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo" if o.device == "cpu" else "nccl")
    if "prompts" in o.stages and not (o.work / "prompts.jsonl").exists():
        make_prompts(o)
    if "generate" in o.stages:
        make_text(o)
    if "train" in o.stages:
        distil(o)
    if "measure" in o.stages and workers()[0] == 0:
        measure(o)


if __name__ == "__main__":
    main()
