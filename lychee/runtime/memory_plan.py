"""What an engine will hold of a device's memory, added up before its KV pool and its arenas are allocated."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lychee.compiler.lower import arena_bytes
from lychee.models.compiled import SHORT, CompiledLlama, context_bucket
from lychee.models.kv_cache import KVCache
from lychee.models.llama import Llama

from .checks import refuse
from .config import MAX_SLOTS, EngineConfig
from .tree import TreeShape

GIB = 2**30


@dataclass(frozen=True)
class ModelMemory:
    """Bytes. weights: with the rope table. arena: activations of the largest passes. block: a KV block, all layers."""

    name: str
    weights: int
    arena: int
    block: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of all that an engine owns. free: what the device had left when the weights were there."""

    models: tuple[ModelMemory, ...]
    num_blocks: int
    block_size: int
    free: int

    @property
    def kv(self) -> int:
        return self.num_blocks * sum(model.block for model in self.models)

    @property
    def arenas(self) -> int:
        return sum(model.arena for model in self.models)

    @property
    def total(self) -> int:
        return self.kv + self.arenas + sum(model.weights for model in self.models)

    def checked(self) -> MemoryPlan:
        """Raises ParameterError, with the numbers, where arenas and KV do not fit in what is free."""
        if self.kv + self.arenas > self.free:
            most = max(0, self.free - self.arenas) // sum(model.block for model in self.models)
            allowed = (
                f"at most {most}: KV takes {_gib(self.kv)}, activations take {_gib(self.arenas)}, and "
                f"{_gib(self.free)} are free"
            )
            raise refuse("num_blocks", self.num_blocks, allowed)
        return self

    @property
    def rows(self) -> list[tuple[str, str]]:
        """What takes memory, and how much: the lines of a table."""
        lines = [(f"{model.name} weights", _mib(model.weights)) for model in self.models]
        lines += [(f"{model.name} activations, at most", _mib(model.arena)) for model in self.models]
        pool = f"{self.num_blocks} blocks of {self.block_size} slots"
        lines += [(f"{m.name} KV, {pool}", _mib(self.num_blocks * m.block)) for m in self.models]
        return [*lines, ("all", _mib(self.total)), ("free beside the weights", _mib(self.free))]


def plan(
    models: Seq[Llama],
    kv_dtypes: Seq[torch.dtype],
    sizes: EngineConfig,
    max_model_len: int,
    shapes: Seq[TreeShape],
    free: int,
) -> MemoryPlan:
    """The plan of a target, perhaps with a draft, whose rounds are of `shapes`; models may be on `meta`.

    Without `sizes.num_blocks` the pool has what max_num_seqs sequences of the full length need, within half of what is
    free. Raises ParameterError where that holds no block.
    """
    vocab = models[0].config.vocab_size
    found = []
    for model, dtype, name in zip(models, kv_dtypes, ("target", "draft"), strict=False):
        arena = _arena(model, dtype, sizes, max_model_len, shapes, vocab, drafts=name == "draft")
        block = KVCache.block_bytes(model.config, sizes.block_size, dtype)
        found.append(ModelMemory(name, model.weights.num_bytes + model.rope.nbytes, arena, block))
    num_blocks = sizes.num_blocks or _num_blocks(found, sizes, max_model_len, free)
    return MemoryPlan(tuple(found), num_blocks, sizes.block_size, free)


def _arena(
    model: Llama,
    kv_dtype: torch.dtype,
    sizes: EngineConfig,
    max_model_len: int,
    shapes: Seq[TreeShape],
    vocab: int,
    drafts: bool,
) -> int:
    """Of the largest round and of a short prefill: a draft's passes are its levels, a target's whole trees."""
    nodes = max(shape.num_nodes for shape in shapes)
    path = max(shape.depth for shape in shapes) + 1
    # A draft's first level is two rows: the token before the root, and the root.
    widest = max([2, *(count for shape in shapes for count in Counter(shape.depths).values())]) if drafts else nodes
    # Of one slot: no arena depends on the number of them.
    kv = replace(KVCache.allocate(model.config, 1, 1, kv_dtype, model.rope.device), block_size=sizes.block_size)
    compiled, num_blocks = CompiledLlama(model, kv), -(-max_model_len // sizes.block_size)
    context = context_bucket(max_model_len, num_blocks, sizes.block_size)
    seqs = sizes.max_num_seqs
    rounds = {"num_tokens": seqs * widest, "num_seqs": seqs, "max_path": path, "max_rows": widest, **context}
    prompt = {"num_tokens": SHORT, "num_seqs": 1, "max_path": SHORT, "max_rows": SHORT, **context, "num_logit_rows": 1}
    log_probs = seqs * nodes * vocab * torch.float32.itemsize
    return arena_bytes(compiled.every_row, rounds) + arena_bytes(compiled.some_rows, prompt) + log_probs


def _num_blocks(models: Seq[ModelMemory], sizes: EngineConfig, max_model_len: int, free: int) -> int:
    block, arenas = sum(model.block for model in models), sum(model.arena for model in models)
    held = max(0, free // 2 - arenas) // block
    if not held:
        why = (
            f"less: a block takes {_gib(block)}, activations take {_gib(arenas)}, and half of the free memory is "
            f"{_gib(free // 2)}"
        )
        raise refuse("block_size", sizes.block_size, why)
    return min(sizes.max_num_seqs * -(-max_model_len // sizes.block_size), held, MAX_SLOTS // sizes.block_size)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken; on the CPU file caches that would make room count as free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.1f} GiB"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
