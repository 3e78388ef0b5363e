"""What bench.cpu_kernels times: an op beside what torch offers for the same, at the shapes of small Llama models.

Each case checks first that its sides agree. A weight is not read again before all others of its shape were: the
caches hold what a forward pass would find in them.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lychee import demo
from lychee.compiler import Lowered, Size, Tracer, lower, trace
from lychee.kernels import OPS, Op, attention, draw, linear, lm_head, process_logits
from lychee.kernels.kernel import Launch, Table
from lychee.kernels.philox import TARGET
from lychee.kernels.quantized import sample_int4, sample_int8
from lychee.kernels.stand_in import bound_class
from lychee.kernels.types import NoiseKeys, SamplingRows, SamplingTensors
from lychee.models.batch import Batch
from lychee.models.compiled import bucket, inputs_of
from lychee.models.config import ModelConfig
from lychee.models.kv_cache import KVCache
from lychee.models.layout import Rows
from lychee.models.projection import OPS as OPS_OF
from lychee.models.projection import AnyWeight, moved, parts

BLOCK_SIZE = 16
SPAN = 32 << 20  # bytes of weights that one run of a linear case reads
RUN = 2e-4  # seconds that one run of any other case takes at least

Reader = Callable[[Tensor], Any]


SMOLLM2 = {  # 135M
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
}


def models() -> dict[str, ModelConfig]:
    """SmolLM2-135M and the packaged pair, by name."""
    return {
        "smollm2-135m": ModelConfig.parse(SMOLLM2),
        "demo-target": ModelConfig.load(demo.TARGET),
        "demo-draft": ModelConfig.load(demo.DRAFT),
    }


Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One op at one number of rows. A run of a side makes `calls` calls; `ours` is the op, the others are torch's.

    `read_bytes`: memory that a call must read and no cache holds; 0 where it works in the caches. Side `read` then
    reads as much as a run does, as fast as torch can.
    """

    section: str
    group: str
    label: str
    rows: int
    sides: Mapping[str, Call]
    calls: int
    read_bytes: int = 0


def checked(section: str, group: str, label: str, rows: int, ours: Call, theirs: Mapping[str, Call]) -> Case:
    """A case whose sides give the same, with runs of at least RUN seconds. Raises AssertionError where one differs."""
    expected = ours()
    for call in theirs.values():
        torch.testing.assert_close(call(), expected, rtol=1e-3, atol=1e-3)
    started = time.perf_counter()
    ours()
    calls = max(1, min(100, math.ceil(RUN / (time.perf_counter() - started))))

    def repeat(call: Call) -> None:
        for _ in range(calls):
            call()

    sides = {name: partial(repeat, call) for name, call in {"ours": ours, **theirs}.items()}
    return Case(section, group, label, rows, sides, calls)


def make_pool(num_bytes: int) -> Tensor:
    """fp32 numbers to take weights from, small enough for sums of thousands."""
    return torch.empty(num_bytes // 4).uniform_(-0.05, 0.05)


class Walk:
    """Spans of weights of one shape, handed out in turn: none is read again before all others were, whoever asks."""

    def __init__(self, pool: Tensor, out_features: int, in_features: int) -> None:
        self.weight_bytes = 4 * out_features * in_features
        count = pool.nbytes // self.weight_bytes
        if count < 2:
            raise ValueError(
                f"the pool has {pool.nbytes} bytes, a weight of {out_features} x {in_features} must fit twice"
            )
        self.calls = max(1, min(count // 2, SPAN // self.weight_bytes))
        self.first = pool[: out_features * in_features].view(out_features, in_features)
        spans = pool[: count // self.calls * self.calls * self.first.numel()].view(-1, self.calls, *self.first.shape)
        self._ahead = itertools.cycle([(span, list(span)) for span in spans])

    def apply(self, call: Callable[[Tensor], Any]) -> None:
        """`call` on each weight of the next span."""
        for weight in next(self._ahead)[1]:
            call(weight)

    def read(self, call: Callable[[Tensor], Any]) -> None:
        """`call` on the next span as one vector."""
        call(next(self._ahead)[0].view(-1))


def linear_cases(name: str, config: ModelConfig, rows: Sequence[int], pool: Tensor, reader: Reader) -> Iterator[Case]:
    """The projections of a layer, then the language-model head."""
    q, kv, hidden = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.hidden_size
    projections = [(q, hidden), (kv, hidden), (hidden, q), (config.intermediate_size, hidden)]
    projections.append((hidden, config.intermediate_size))
    shapes = [*((shape, linear) for shape in dict.fromkeys(projections)), ((config.vocab_size, hidden), lm_head)]
    for ((out_features, in_features), op), num_rows in itertools.product(shapes, rows):
        walk, x = Walk(pool, out_features, in_features), torch.randn(num_rows, in_features)
        torch.testing.assert_close(op(x, walk.first), F.linear(x, walk.first), rtol=1e-3, atol=1e-3)
        sides = {"ours": partial(walk.apply, partial(op, x)), "torch": partial(walk.apply, partial(F.linear, x))}
        if num_rows == 1:
            sides["read"] = partial(walk.read, reader)
        label = f"{in_features} to {out_features}"
        yield Case("linear", name, label, num_rows, sides, walk.calls, walk.weight_bytes)


def pass_cases(name: str, config: ModelConfig, rows: Sequence[int], reader: Reader) -> Iterator[Case]:
    """All products of a forward pass, head included, by type of weights; a table of bound launches runs them.

    Every layer has weights of its own. Torch multiplies fp32 ones.
    """
    q, kv, hidden = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.hidden_size
    layer = [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q)]
    layer += [(config.intermediate_size, hidden)] * 2 + [(hidden, config.intermediate_size)]
    shapes = [*layer * config.num_layers, (config.vocab_size, hidden)]
    dense = [torch.empty(shape).uniform_(-0.05, 0.05) for shape in shapes]
    formats: dict[str, Callable[[int, int], AnyWeight]] = {
        "int4": lambda rows, columns: sample_int4(rows, columns, 32, minimums=1, exact=1, device="cpu"),
        "int8": lambda rows, columns: moved(sample_int8(rows, columns, 0, "cpu"), "cpu", torch.float32),
    }
    for kind in ("fp32", *formats):
        weights = [formats[kind](*shape) for shape in shapes] if kind in formats else dense
        read = sum(part.nbytes for weight in weights for part in parts(weight))
        vector = torch.ones(read // 4)
        for num_rows in rows:
            xs = {width: torch.randn(num_rows, width) for _, width in shapes}
            launches: list[Launch] = []
            for weight, (_, width) in zip(weights, shapes, strict=True):
                OPS_OF[type(weight)][0](xs[width].as_subclass(bound_class(launches)), weight)

            def theirs(xs: Mapping[int, Tensor] = xs) -> None:
                for weight in dense:
                    F.linear(xs[weight.shape[1]], weight)

            sides = {"ours": Table(launches).replay, "torch": theirs, "read": partial(reader, vector)}
            yield Case("pass", name, kind, num_rows, sides, 1, read)


def attention_cases(name: str, config: ModelConfig, rows: Sequence[int]) -> Iterator[Case]:
    """A chain of rows after 100, 512 and 2000 cached tokens in shuffled blocks; a call is one layer with its own cache.

    Ours is what a decode pass does: all layers' launches bound and replayed. `op by op` is the same from Python.
    Torch is given what suits it best: keys and values contiguous per head, the additive mask made beforehand, and of
    two forms the faster: the heads of a group as further rows, or keys and values repeated for every head.
    """
    head_dim, kv_heads = config.head_dim, config.num_kv_heads
    group = config.num_heads // kv_heads
    lengths = [keys for keys in (100, 512, 2000) if keys <= config.max_positions]
    for keys, num_rows in itertools.product(lengths, rows):
        num_blocks = -(-(keys + num_rows) // BLOCK_SIZE)
        table = torch.randperm(num_blocks)
        chain = Rows.decode([[1] * num_rows], [range(-1, num_rows - 1)], [keys], [table.tolist()], BLOCK_SIZE)
        kv = KVCache(torch.randn(config.num_layers, 2, num_blocks * BLOCK_SIZE, kv_heads, head_dim), BLOCK_SIZE)
        slots = (table[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[: keys + num_rows]
        contiguous = kv.storage[:, :, slots].transpose(2, 3).contiguous()
        mask = torch.full((num_rows, keys + num_rows), float("-inf")).triu(keys + 1)
        q = torch.randn(num_rows, config.num_heads, head_dim)
        heads = q.transpose(0, 1)
        forms = {
            "torch, grouped": (
                heads.reshape(1, kv_heads, group * num_rows, head_dim),
                contiguous,
                mask.repeat(group, 1),
            ),
            "torch, repeated": (heads.contiguous()[None], contiguous.repeat_interleave(group, 2), mask),
        }
        scale = head_dim**-0.5
        lowered = _bound(q, kv, chain, scale)
        sides: dict[str, Call] = {"ours": lowered.replay, "op by op": partial(_paged, q, kv, Batch.of(chain), scale)}
        expected = sides["op by op"]().transpose(0, 1)
        lowered.replay()
        torch.testing.assert_close(lowered.results[0], expected.transpose(0, 1), rtol=0, atol=0)
        for form, (query, caches, bias) in forms.items():
            sides[form] = partial(_sdpa, query, list(caches.unsqueeze(2)), bias if num_rows > 1 else None)
            torch.testing.assert_close(sides[form]().view(expected.shape), expected, rtol=1e-3, atol=1e-3)
        yield Case("attention", name, f"{keys} keys", num_rows, sides, config.num_layers)


def _bound(q: Tensor, kv: KVCache, rows: Rows, scale: float) -> Lowered:
    """The launches of `_paged` as a decode pass has them."""

    def attended(tracer: Tracer) -> Tensor:
        given = tracer.tensor("q", [Size("num_tokens"), *q.shape[1:]], q.dtype)
        return _paged(given, kv, tracer.struct(Batch, block_size=BLOCK_SIZE, logit_rows=None), scale)

    program = trace(attended, "cpu")
    lowered = lower(program, bucket(rows))
    lowered.write([q.numpy(), *inputs_of(rows)])
    return lowered


def _paged(q: Tensor, kv: KVCache, batch: Batch, scale: float) -> Tensor:
    """Attention in every layer; the last one's result."""
    assert batch.ancestors is not None
    for keys, values in kv.layers:
        out = attention(q, keys, values, batch.paging, batch.ancestors, scale)
    return out


def _sdpa(query: Tensor, caches: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    for keys, values in caches:
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias)
    return out


def row_cases(name: str, config: ModelConfig, rows: Sequence[int]) -> Iterator[Case]:
    """Normalisation, rotation and gate against their references."""
    heads = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    sizes: dict[str, dict[str, int]] = {
        "rms_norm": {"hidden": config.hidden_size},
        "add_rms_norm": {"hidden": config.hidden_size},
        "rope_store": {**heads, "num_slots": 2048, "num_positions": 2048},
        "swiglu": {"intermediate": config.intermediate_size},
    }
    for (op_name, axes), num_rows in itertools.product(sizes.items(), rows):
        op = OPS[op_name]
        inputs = op.contract.arguments((), op.sample(torch.float32, "cpu", num_tokens=num_rows, **axes))
        yield beside_reference("rows", name, op_name, num_rows, op, tuple(inputs.values()))


SAMPLING = {
    "greedy": {"temperature": 0.0, "top_k": 0, "top_p": 1.0},
    "temperature": {"temperature": 0.8, "top_k": 0, "top_p": 1.0},
    "top-k, top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
}


def sampling_cases(vocabs: Sequence[int], rows: Sequence[int]) -> Iterator[Case]:
    """process_logits by kind of request, and drawing greedily and with noise; the rows are of one sequence."""
    for vocab, num_rows in itertools.product(vocabs, rows):
        group, zeros = f"vocabulary {vocab}", torch.zeros(num_rows, dtype=torch.int32)
        logits = torch.randn(num_rows, vocab) * 3
        sampling_rows = SamplingRows(zeros, zeros, zeros, zeros[:, None])
        for kind, values in SAMPLING.items():
            arguments = (logits, sampling_rows, _sampling(values), vocab)
            yield beside_reference("sampling", group, f"process_logits, {kind}", num_rows, process_logits, arguments)
        log_probs, seeds = logits.log_softmax(-1), torch.full((num_rows,), 7)
        for kind, greedy in (("greedy", True), ("noise", False)):
            keys = NoiseKeys(
                seeds, torch.arange(num_rows, dtype=torch.int32), zeros, zeros, torch.full((num_rows,), greedy)
            )
            arguments = (log_probs, keys, 1, TARGET, False)
            yield beside_reference("sampling", group, f"draw, {kind}", num_rows, draw, arguments)


def beside_reference(
    section: str, group: str, label: str, rows: int, op: Op[Any, Any], arguments: tuple[Any, ...]
) -> Case:
    return checked(section, group, label, rows, partial(op, *arguments), {"torch": partial(op.reference, *arguments)})


def _sampling(values: Mapping[str, float]) -> SamplingTensors:
    """One sequence without penalties, bans or biases."""
    floats = {key: torch.tensor([values.get(key, 0.0)]) for key in ("temperature", "top_p", "min_p")}
    none = torch.zeros(1, 0, dtype=torch.int32)
    return SamplingTensors(
        **floats,
        top_k=torch.tensor([int(values["top_k"])], dtype=torch.int32),
        repetition_penalty=torch.ones(1),
        presence_penalty=torch.zeros(1),
        frequency_penalty=torch.zeros(1),
        min_position=torch.zeros(1, dtype=torch.int32),
        stop_ids=none,
        bias_ids=none,
        bias=torch.zeros(1, 0),
        bad_words=torch.zeros(1, 0, 0, dtype=torch.int32),
        token_counts=None,
    )
