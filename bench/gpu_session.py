"""All that a GPU is needed for, as steps that do not depend on each other: `bash bench/gpu_session.sh [--out DIR]`.

Needs torch, Triton and lychee's dependencies, and no network. A step is a process with a time limit: one that fails, or
is stopped, costs the others nothing, and what it had written by then is kept. DIR gets the JSON and the output of every
step, and `session.json` with what became of them. `--dry-run` runs every step at small sizes, on the CPU where there is
no GPU. CUDA runs op by op here: there is no graph capture yet.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton

from bench.parser import Parser

SECONDS = 480


@dataclass(frozen=True)
class Step:
    """`flags` follow the module's name; `small` are those of a dry run. `seconds`: its limit."""

    name: str
    module: str
    flags: tuple[str, ...]
    small: tuple[str, ...]
    seconds: float


def checks(name: str, seconds: float) -> Step:
    return Step(name, "bench.gpu_checks", (name,), (name, "--small"), seconds)


def dialled(name: str, seconds: float, *flags: str) -> Step:
    tiny = "--target", "tiny", "--draft", "tiny-draft", "--batches", "1", "--acceptance", "0.7"
    return Step(name, "bench.dialled", flags, (*tiny, "--prompt-len", "16", "--max-tokens", "12"), seconds)


STEPS = (
    checks("kernels", 100),
    checks("rows", 40),
    checks("rooflines", 100),
    checks("launches", 20),
    dialled("dialled-bf16", 110),
    dialled("dialled-int8-draft", 110, "--draft-format", "int8"),
)


@dataclass(frozen=True)
class Outcome:
    """code: the exit code, None where the time was up. records: what it wrote by then. said: its last line."""

    step: str
    code: int | None
    seconds: float
    records: int
    said: str

    @property
    def verdict(self) -> str:
        return "passed" if self.code == 0 else "out of time" if self.code is None else "FAILED"


def run(step: Step, dry: bool, out: Path, limit: float) -> Outcome:
    file, log = out / f"{step.name}.json", out / f"{step.name}.txt"
    command = [sys.executable, "-m", step.module, *(step.small if dry else step.flags), "--json", str(file)]
    started = time.perf_counter()
    with log.open("w") as output:
        try:
            code: int | None = subprocess.run(command, stdout=output, stderr=output, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            code = None
    taken = time.perf_counter() - started
    lines = log.read_text(errors="replace").strip().splitlines()
    return Outcome(step.name, code, taken, _count(file), lines[-1] if lines else "")


def _count(file: Path) -> int:
    """Records of a step's file; what was cut off counts as none."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return 0
    return len(found["rows"] if isinstance(found, dict) else found)


def main(argv: Sequence[str] | None = None) -> int:
    p = Parser(__doc__)
    p.add_argument("--out", type=Path, default=Path("build/gpu-session"), metavar="DIR")
    p.add_argument("--dry-run", action="store_true")
    p.add_argument("--seconds", type=float, default=SECONDS, help="for all steps together (default %(default)s)")
    p.add_argument("--steps", default=",".join(step.name for step in STEPS), help="names between commas; default all")
    args = p.parse_args(argv)
    names = args.steps.split(",")
    if unknown := sorted(set(names) - {step.name for step in STEPS}):
        p.error(f"--steps has {unknown[0]!r}, must be of {', '.join(step.name for step in STEPS)}")
    on_cuda = torch.cuda.is_available()
    if not on_cuda and not args.dry_run:
        p.error("torch finds no CUDA device; --dry-run runs every step at small sizes on the CPU")
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if on_cuda else "CPU"
    print(f"{device}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    ends, outcomes = time.perf_counter() + args.seconds, []
    for step in STEPS:
        if step.name not in names:
            continue
        left = ends - time.perf_counter()
        outcome = run(step, args.dry_run, args.out, max(1.0, min(step.seconds, left)))
        outcomes.append(outcome)
        line = f"{outcome.step:<20} {outcome.verdict:<12} {outcome.seconds:6.1f} s {outcome.records:5} records"
        print(line if outcome.code == 0 else f"{line}   {outcome.said[:160]}", flush=True)
        versions = {"device": device, "torch": torch.__version__, "triton": triton.__version__, "dry_run": args.dry_run}
        record = {**versions, "steps": [{**asdict(o), "verdict": o.verdict} for o in outcomes]}
        (args.out / "session.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if all(outcome.code == 0 for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
