"""Load on `lychee serve`: many clients that stream, go away, read slowly or send nonsense; then SIGTERM under load.

python -m bench.serve_load --clients 200 --seconds 180

Every answer is compared with native decoding of the packaged target, greedy or with a seed. Afterwards nothing may be
open, no block in use, and the server's memory where it was.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.parser import Parser
from lychee import LLM, SamplingParams, demo
from lychee.nouns import counted

MOST_GROWN_MIB = 32
MODEL, MAX_TOKENS = "lychee-demo", 48
KINDS = {"read": 0.65, "gone": 0.15, "slow": 0.1, "malformed": 0.1}
MALFORMED = (b"{", b"[]", b'{"model": "lychee-demo"}', b'{"model": "lychee-demo", "prompt": "a", "foo": 1}', b"\xff")


@dataclass(frozen=True)
class Case:
    body: bytes
    text: str


@dataclass
class Seen:
    """wrong: what should not have been, in words."""

    counts: Counter[str] = field(default_factory=Counter)
    tokens_read: int = 0
    wrong: list[str] = field(default_factory=list)


def cases(num_prompts: int) -> list[Case]:
    """Requests with what native decoding says to them."""
    prompts = [prompt for kind in demo.prompts().values() for prompt in kind][:num_prompts]
    llm = LLM(demo.TARGET, device="cpu")
    found = []
    for params in (
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.0, "top_p": 0.9, "seed": 2},
    ):
        outputs = llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS, **params))
        for prompt, output in zip(prompts, outputs, strict=True):
            body = {"model": MODEL, "prompt": prompt, "max_tokens": MAX_TOKENS, "stream": True, **params}
            found.append(Case(json.dumps(body).encode(), output.outputs[0].text))
    return found


async def client(port: int, cases: Seq[Case], seen: Seen, rng: random.Random, until: float) -> None:
    while time.perf_counter() < until:
        kind = rng.choices([*KINDS], [*KINDS.values()])[0]
        try:
            await asyncio.wait_for(exchange(port, kind, rng.choice(cases), seen, rng), 300)
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
            seen.wrong.append(f"{kind}: {type(error).__name__} {error}")
        seen.counts[kind] += 1


def request(body: bytes) -> bytes:
    head = "POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(body)}"
    return "\r\n".join((*head, "", "")).encode() + body


async def exchange(port: int, kind: str, case: Case, seen: Seen, rng: random.Random) -> None:
    """One request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
    try:
        body = rng.choice(MALFORMED) if kind == "malformed" else case.body
        writer.write(request(body))
        status = int((await reader.readline()).split()[1])
        if kind == "malformed":
            if status not in (400, 404):
                seen.wrong.append(f"malformed: status {status}")
            return
        if status != 200:
            seen.wrong.append(f"{kind}: status {status}")
            return
        text, end = await read_events(reader, kind, rng)
        seen.tokens_read += MAX_TOKENS if end == "done" else 0
        if end == "left":
            if not case.text.startswith(text):
                seen.wrong.append(f"gone: {text!r} does not begin {case.text!r}")
        elif end != "done" or text != case.text:
            seen.wrong.append(f"{kind}: {end}, {text!r} is not {case.text!r}")
    finally:
        writer.close()


async def read_events(reader: asyncio.StreamReader, kind: str, rng: random.Random) -> tuple[str, str]:
    """Text, and how it ended: `done`, the code of an `error`, `cut`, or `left` where the client goes away."""
    text, leave_after = "", rng.randrange(1, 12) if kind == "gone" else None
    while line := await reader.readline():
        if kind == "slow":
            await asyncio.sleep(0.02)
        if not line.startswith(b"data: "):
            continue
        if line == b"data: [DONE]\n":
            return text, "done"
        event = json.loads(line[6:])
        if "error" in event:
            return text, event["error"]["code"]
        text += event["choices"][0]["text"]
        if leave_after is not None and (leave_after := leave_after - 1) == 0:
            return text, "left"
    return text, "cut"


async def under_sigterm(port: int, cases: Seq[Case], server: subprocess.Popen[str], clients: int) -> Counter[str]:
    """How requests ended that were open when the signal came, or came after it."""
    ends: Counter[str] = Counter()

    async def one(case: Case) -> None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            ends["no connection"] += 1
            return
        try:
            writer.write(request(case.body))
            status = int(((await reader.readline()).split() or [b"", b"0"])[1])
            if status != 200:
                ends[f"status {status}"] += 1
                return
            text, end = await read_events(reader, "read", random.Random(0))
            ends["wrong text" if end == "done" and text != case.text else end] += 1
        except OSError:
            ends["cut"] += 1
        finally:
            writer.close()

    open_ones = [asyncio.create_task(one(case)) for case, _ in zip(_forever(cases), range(clients), strict=False)]
    await asyncio.sleep(0.5)
    server.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.2)
    late = [asyncio.create_task(one(case)) for case in cases[:5]]
    await asyncio.gather(*open_ones, *late)
    return ends


def _forever(cases: Seq[Case]) -> Any:
    while True:
        yield from cases


def start(options: Seq[str], log: Path) -> tuple[subprocess.Popen[str], int]:
    """The server on a free port; its log goes to a file."""
    command = [sys.executable, "-m", "lychee", "serve", "--port", "0", *options]
    with log.open("w") as errors:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert server.stdout
    line = server.stdout.readline()
    if not line:
        raise SystemExit(f"the server did not start: {log.read_text()}")
    return server, int(line.rsplit(":", 1)[1].split("/")[0])


def resident_mib(pid: int) -> float:
    fields = Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()
    return int(fields[0]) / 1024


async def metrics(port: int) -> dict[str, float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    lines = (await reader.read()).decode().splitlines()
    writer.close()
    return {key: float(value) for key, value in (x.rsplit(" ", 1) for x in lines if x.startswith("lychee:"))}


async def settled(port: int, timeout_s: float = 60) -> bool:
    """Whether nothing is open any more, and no block in use, before the time is over."""
    until = time.perf_counter() + timeout_s
    while time.perf_counter() < until:
        values = await metrics(port)
        held = [v for k, v in values.items() if k.split("{")[0].split(":")[1] in HELD]
        if not any(held):
            return True
        await asyncio.sleep(0.1)
    return False


HELD = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


async def load(
    port: int, pid: int, cases: Seq[Case], clients: int, seconds: float, seed: int
) -> tuple[Seen, list[float]]:
    """All clients at once; memory in MiB, ten times over the run and once after it."""
    seen, until = Seen(), time.perf_counter() + seconds
    running = [asyncio.create_task(client(port, cases, seen, random.Random(seed + i), until)) for i in range(clients)]
    memory = []
    for _ in range(10):
        await asyncio.sleep(seconds / 10)
        memory.append(resident_mib(pid))
    await asyncio.gather(*running)
    if not await settled(port):
        seen.wrong.append("something is still open, or blocks are in use")
    return seen, [*memory, resident_mib(pid)]


def run(clients: int, seconds: float, prompts: int = 30, seed: int = 0, options: Seq[str] = ()) -> dict[str, Any]:
    """Load, then SIGTERM under load: what was seen."""
    known = cases(prompts)
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        server, port = start(["--max-queue", str(2 * clients), *options], log)
        try:
            began = time.perf_counter()
            seen, memory = asyncio.run(load(port, server.pid, known, clients, seconds, seed))
            taken = time.perf_counter() - began
            ends = asyncio.run(under_sigterm(port, known, server, clients))
            code = server.wait(120)
        finally:
            server.kill()
        entries = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return {
        "exchanges": dict(seen.counts),
        "wrong": seen.wrong,
        "tokens_per_second_read_whole": round(seen.tokens_read / taken, 1),
        "statuses": dict(Counter(str(entry["status"]) for entry in entries)),
        "tracebacks": sum("traceback" in entry for entry in entries),
        "memory_mib": [round(value, 1) for value in memory],
        "grown_mib_in_second_half": round(grown(memory[:10]), 1),
        "ends_under_sigterm": dict(ends),
        "exit_code": code,
    }


def sound(found: dict[str, Any]) -> list[str]:
    """What is wrong with a run."""
    wrong = [*found["wrong"]]
    if found["tracebacks"]:
        wrong.append(f"{counted(found['tracebacks'], 'request')} with a traceback in the log")
    if bad := {end: n for end, n in found["ends_under_sigterm"].items() if end in ("cut", "wrong text")}:
        wrong.append(f"under SIGTERM: {bad}")
    if found["exit_code"] != 0:
        wrong.append(f"the server's exit code is {found['exit_code']}")
    if found["grown_mib_in_second_half"] > MOST_GROWN_MIB:
        wrong.append(f"memory grows: {found['memory_mib']} MiB")
    return wrong


def grown(memory: Seq[float]) -> float:
    """MiB in the second half of a run, by a line through its values: caches are full by then."""
    second = memory[len(memory) // 2 :]
    return float(np.polyfit(range(len(second)), second, 1)[0]) * (len(second) - 1)


def main(argv: Seq[str] | None = None) -> int:
    p = Parser(__doc__)
    p.add_argument("--clients", type=int, default=200)
    p.add_argument("--seconds", type=float, default=180)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("options", nargs="*", help="options of lychee serve, after --")
    args = p.parse_args(argv)
    found = run(args.clients, args.seconds, seed=args.seed, options=args.options)
    print(json.dumps({**found, "wrong": found["wrong"][:20]}, indent=1))
    wrong = sound(found)
    print("\n".join(wrong[:20]) if wrong else "sound")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
