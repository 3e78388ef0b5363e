"""A process that opens damaged files: `python -m tests.models.malformed.worker KIND FIRST COUNT FOLDER`

It prints a line before and after each case: the seed, and what came of it. It may take a gibibyte more memory than it
has at the start, and seconds of processor time a case: beyond those the system ends it, as a crash does.
"""

import contextlib
import json
import random
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from lychee.models.config import ModelConfig
from lychee.models.files import ModelError
from lychee.models.gguf_file import GGUFFile
from lychee.models.llama import Llama
from lychee.models.tokenizer_files import load_tokenizer
from lychee.models.weights import expected_shapes
from tests.factory import make_model_dir, save_tokenizer
from tests.models.gguf_factory import to_gguf
from tests.models.malformed.mutations import damaged_bytes, damaged_gguf, damaged_json

MEMORY_BYTES = 1 << 30
CPU_SECONDS = 20
SMALL = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 32, "max_position": 64}
TEXT = "Hello wörld 日本 😀 </s>\n 123"
Damage = Callable[[random.Random], None]


def check_model(path: Path, num_bytes: int) -> None:
    """Weights are those that the config asks for, and no larger than the file can hold in blocks of four bits."""
    model = Llama.load(path, dtype=torch.float32)
    shapes = expected_shapes(model.config)
    assert tuple(model.weights.embed.shape) == shapes["model.embed_tokens.weight"]
    assert len(model.weights.layers) == model.config.num_layers
    assert model.weights.num_bytes <= 16 * num_bytes


def check_tokenizer(path: Path) -> None:
    tokenizer = load_tokenizer(path)
    assert len(tokenizer.pieces) == tokenizer.size
    try:
        ids = tokenizer.encode(TEXT)
    except ValueError as error:
        if "cannot encode as plain text" in str(error) or "cannot be encoded by this tokenizer" in str(error):
            return
        raise
    assert all(0 <= i < tokenizer.size for i in ids)
    tokenizer.decode(ids)
    tokenizer.encode_chat(TEXT)


def gguf(folder: Path, tokenizer: str) -> tuple[Damage, Callable[[], None]]:
    model = make_model_dir(folder / "m", **SMALL, tokenizer=tokenizer)
    file = to_gguf(folder / "m.gguf", model, tokenizer=tokenizer)
    content, spans = file.read_bytes(), {}
    for key in GGUFFile.open(file).metadata:
        at = content.index(len(key).to_bytes(8, "little") + key.encode()) + 8 + len(key)
        spans[key] = (at, _value_end(content, at))

    def damage(rng: random.Random) -> None:
        file.write_bytes(damaged_gguf(content, rng, spans))

    def check() -> None:
        with contextlib.suppress(ModelError):  # the weights may be whole
            check_tokenizer(file)
        check_model(file, file.stat().st_size)

    return damage, check


def _value_end(content: bytes, at: int) -> int:
    """The end of a short value; of a long array, a place inside it."""
    kind = int.from_bytes(content[at : at + 4], "little")
    if kind == 8:
        return at + 12 + int.from_bytes(content[at + 4 : at + 12], "little")
    return at + {9: 4 + 4 + 8 + 200, 7: 5}.get(kind, 8)


def safetensors(folder: Path, shards: int) -> tuple[Damage, Callable[[], None]]:
    model = make_model_dir(folder, **SMALL, tokenizer=None, shards=shards)
    files = {file: file.read_bytes() for file in sorted(model.glob("model*"))}

    def damage(rng: random.Random) -> None:
        for file, content in files.items():
            file.write_bytes(content)
        file, content = rng.choice(list(files.items()))
        length = int.from_bytes(content[:8], "little")
        if file.suffix == ".json":
            file.write_bytes(damaged_json(content.decode(), rng))
        elif rng.random() < 0.5:
            file.write_bytes(damaged_bytes(content, rng, length))
        else:
            header = damaged_json(content[8 : 8 + length].decode(), rng)
            file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])

    return damage, lambda: check_model(model, sum(len(content) for content in files.values()))


def config(folder: Path) -> tuple[Damage, Callable[[], None]]:
    model = make_model_dir(folder, **SMALL, tokenizer=None, rope_scaling={"rope_type": "linear", "factor": 2.0})
    (model / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    files = {name: (model / name).read_text() for name in ("config.json", "generation_config.json")}

    def damage(rng: random.Random) -> None:
        for name, content in files.items():
            (model / name).write_text(content)
        name = rng.choice(("config.json", "config.json", "generation_config.json"))
        (model / name).write_bytes(damaged_json(files[name], rng))

    def check() -> None:
        ModelConfig.load(model)
        check_model(model, (model / "model.safetensors").stat().st_size)

    return damage, check


def tokenizer_file(folder: Path, kind: str, name: str) -> tuple[Damage, Callable[[], None]]:
    save_tokenizer(folder, kind)
    content = (folder / name).read_bytes()

    def damage(rng: random.Random) -> None:
        damaged = (
            damaged_json(content.decode(), rng) if name.endswith(".json") else damaged_bytes(content, rng, len(content))
        )
        (folder / name).write_bytes(damaged)

    return damage, lambda: check_tokenizer(folder)


KINDS = {
    "gguf_bpe": lambda folder: gguf(folder, "bpe"),
    "gguf_sentencepiece": lambda folder: gguf(folder, "sentencepiece"),
    "safetensors": lambda folder: safetensors(folder, 1),
    "sharded": lambda folder: safetensors(folder, 2),
    "config": config,
    "tokenizer_json": lambda folder: tokenizer_file(folder, "bpe", "tokenizer.json"),
    "tokenizer_model": lambda folder: tokenizer_file(folder, "sentencepiece", "tokenizer.model"),
    "tokenizer_config": lambda folder: tokenizer_file(folder, "sentencepiece", "tokenizer_config.json"),
}


def main(kind: str, first: int, count: int, folder: Path) -> None:
    damage, check = KINDS[kind](folder)
    check()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for seed in range(first, first + count):
        print(seed, end=" ", flush=True)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        damage(random.Random(f"{kind} {seed}"))
        try:
            check()
            print("loaded")
        except ModelError as error:
            print(
                "refused"
                if "\n" not in str(error) and len(str(error)) < 1000
                else f"not a sentence: {json.dumps(str(error))}"
            )
        except BaseException as error:
            print(f"{type(error).__name__}: {json.dumps(str(error)[:300])}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
