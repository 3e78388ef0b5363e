"""LLM: the Python interface. Loads a model (and a draft), then generates or streams."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from lychee.models.chat import ChatTemplate
from lychee.models.detokenizer import Detokenizer
from lychee.models.kv_cache import KVCache
from lychee.models.llama import Llama
from lychee.models.tokenizer import check_pair
from lychee.models.tokenizer_files import load_tokenizer

from .blocks import BlockPool
from .config import EngineConfig, SpeculativeConfig
from .controller import make_controller
from .drafter import Drafter, ModelDrafter
from .engine import Engine
from .metrics import Metrics, RequestStats
from .sampling_params import ParameterError, SamplingParams, refuse
from .scheduler import Scheduler
from .sequence import Mode, Sequence
from .streamer import Chunk, TokenLogprob

Prompt = str | Seq[int]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None  # stop, length or abort; None while it goes on
    stop_reason: int | str | None
    logprobs: tuple[TokenLogprob, ...] | None
    stats: RequestStats


@dataclass(frozen=True)
class RequestOutput:
    """A prompt with its completions, in the order of `index`."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]


@dataclass(frozen=True)
class Request:
    prompt: str | None
    seqs: tuple[Sequence, ...]

    @property
    def request_id(self) -> int:
        return self.seqs[0].request_id


class Stream:
    """Chunks of some requests; `chunk.request_id` counts their prompts from 0. Closing it ends them."""

    def __init__(self, requests: Seq[Request], chunks: Generator[Chunk, None, None]) -> None:
        self._requests, self._chunks = requests, chunks
        self._index = {request.request_id: i for i, request in enumerate(requests)}
        self._logprobs: dict[tuple[int, int], list[TokenLogprob]] = {}

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        chunk = next(self._chunks)
        index = self._index[chunk.request_id]
        self._logprobs.setdefault((index, chunk.sample_idx), []).extend(chunk.logprobs or ())
        return replace(chunk, request_id=index)

    def close(self) -> None:
        self._chunks.close()

    def outputs(self) -> list[RequestOutput]:
        """The completions so far, one RequestOutput per prompt."""
        return [
            RequestOutput(
                prompt=request.prompt,
                prompt_token_ids=request.seqs[0].prompt,
                outputs=tuple(self._completion(i, seq) for seq in request.seqs),
            )
            for i, request in enumerate(self._requests)
        ]

    def _completion(self, index: int, seq: Sequence) -> CompletionOutput:
        logprobs = self._logprobs.get((index, seq.sample_idx), [])
        return CompletionOutput(
            index=seq.sample_idx,
            text=seq.text,
            token_ids=tuple(seq.emitted),
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            logprobs=None if seq.params.logprobs is None else tuple(logprobs),
            stats=seq.stats,
        )


class LLM:
    """A target model, optionally with a draft model that makes it answer faster.

    model, draft_model: Hugging Face model directories. speculative_config: a SpeculativeConfig or a mapping of its
    fields, which may name the draft as `model`. device: `cpu` or `cuda`; None takes CUDA where there is one. dtype:
    `float32`, `float16`, `bfloat16`; `auto` is the checkpoint's on CUDA and float32 on the CPU. The other keywords are
    EngineConfig's. Raises ParameterError, or the loader's error, in a sentence that names what is wrong.
    """

    def __init__(
        self,
        model: str | Path,
        draft_model: str | Path | None = None,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        *,
        device: str | None = None,
        dtype: str = "auto",
        **sizes: Any,
    ) -> None:
        if isinstance(speculative_config, Mapping):
            given = dict(speculative_config)
            named = given.pop("model", None)
            if named is not None and draft_model is not None and str(named) != str(draft_model):
                raise ParameterError(f"draft_model is {draft_model!r} where speculative_config names {named!r}")
            draft_model = named if draft_model is None else draft_model
            speculative_config = SpeculativeConfig.parse(given)
        if speculative_config is not None and draft_model is None:
            raise ParameterError("speculative_config is given without a draft_model")
        self.speculative_config = speculative_config or SpeculativeConfig()
        self.device = _device(device)
        if dtype != "auto" and dtype not in DTYPES:
            raise refuse("dtype", dtype, "auto, " + ", ".join(DTYPES))
        kind = DTYPES.get(dtype) or (torch.float32 if self.device.type == "cpu" else None)
        self.tokenizer = load_tokenizer(model)
        draft_tokenizer = None if draft_model is None else load_tokenizer(draft_model)
        if draft_tokenizer is not None:
            try:
                check_pair(self.tokenizer, draft_tokenizer)
            except ValueError as error:
                raise ParameterError(f"draft_model does not fit the model: {error}") from error
        self.target = Llama.load(model, device=self.device, dtype=kind)
        self.draft = None if draft_model is None else Llama.load(draft_model, device=self.device, dtype=kind)
        self.vocab = min(self.tokenizer.size, self.target.config.vocab_size)
        if self.draft is not None and self.draft.config.vocab_size < self.vocab:
            raise ParameterError(
                f"draft_model has vocab_size {self.draft.config.vocab_size}, must hold the target's {self.vocab} tokens"
            )
        self._path = model
        self._chat_template: ChatTemplate | None = None
        try:
            self.sizes = EngineConfig(**sizes)
        except TypeError as error:
            raise ParameterError(f"LLM: {error}") from error
        limit = self.target.config.max_position_embeddings
        self.max_model_len = self.sizes.max_model_len or limit
        if self.max_model_len > limit:
            raise refuse("max_model_len", self.max_model_len, f"at most the model's {limit}")
        self._engines: dict[bool, Engine] = {}
        self._inboxes: dict[int, deque[Chunk]] = {}
        self._next_id = 0

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        native: bool = False,
    ) -> list[RequestOutput]:
        """Complete the prompts together, as one batch. `native` decodes without the draft model."""
        stream = self.stream(prompts, params, native=native)
        for _ in stream:
            pass
        return stream.outputs()

    def stream(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        native: bool = False,
    ) -> Stream:
        """As `generate`, but an iterator over chunks, each yielded when its round ends."""
        requests = self._requests(prompts, params)
        return Stream(requests, self._run(self.engine(native), [seq for r in requests for seq in r.seqs]))

    def chat(
        self,
        messages: Seq[Mapping[str, str]],
        params: SamplingParams | None = None,
        *,
        native: bool = False,
    ) -> RequestOutput:
        """Complete a conversation through the model's chat template."""
        return self.generate([self.encode_chat(messages)], params, native=native)[0]

    def encode_chat(self, messages: Seq[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation under the model's chat template, ready for the assistant's turn."""
        if self._chat_template is None:
            self._chat_template = ChatTemplate.load(self._path, self.tokenizer)
        return self.tokenizer.encode_chat(self._chat_template.render(messages))

    def mode(self, params: SamplingParams) -> Mode:
        """How proposals for such a request are accepted."""
        if params.greedy:
            return Mode.GREEDY
        verify = self.speculative_config.verify
        coupled = verify == "coupled" or (verify == "auto" and params.seed is not None)
        return Mode.COUPLED if coupled else Mode.REJECTION

    def engine(self, native: bool = False) -> Engine:
        """The engine that runs with the draft model, or natively; made on first use."""
        native = native or self.draft is None
        if native not in self._engines:
            self._engines[native] = self._make_engine(native)
        return self._engines[native]

    def metrics(self, native: bool = False) -> Metrics:
        """The metrics of an engine since it was made or its metrics were reset."""
        engine = self.engine(native)
        engine.metrics.peak_memory_bytes = self._memory(engine)
        return engine.metrics

    def reset_metrics(self, native: bool = False) -> None:
        engine = self.engine(native)
        engine.metrics = Metrics()
        engine.scheduler.num_preemptions = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _make_engine(self, native: bool) -> Engine:
        block_size, sizes = self.sizes.block_size, self.sizes
        draft = None if native else self.draft
        models = [self.target] if draft is None else [self.target, draft]
        num_blocks = sizes.num_blocks or self._num_blocks(models)
        kv = KVCache.allocate(self.target.config, num_blocks, block_size, self.target.weights.embed.dtype, self.device)
        drafter: Drafter | None = None
        if draft is not None:
            draft_kv = KVCache.allocate(draft.config, num_blocks, block_size, draft.weights.embed.dtype, self.device)
            drafter = ModelDrafter(draft, draft_kv, self.vocab, sizes.max_num_batched_tokens)
        pool = BlockPool(num_blocks, block_size)
        scheduler = Scheduler(pool, sizes.max_num_seqs, sizes.max_num_batched_tokens)
        controller = make_controller(self.speculative_config)
        lossless = self.speculative_config.fallback_sampling
        return Engine(self.target, kv, scheduler, drafter, controller, vocab=self.vocab, lossless=lossless)

    def _num_blocks(self, models: Seq[Llama]) -> int:
        """What max_num_seqs sequences of the full length need, within half of the free memory."""
        per_block = sum(KVCache.block_bytes(m.config, self.sizes.block_size, m.weights.embed.dtype) for m in models)
        wanted = self.sizes.max_num_seqs * -(-self.max_model_len // self.sizes.block_size)
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
        else:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return max(1, min(wanted, free // 2 // per_block))

    def _memory(self, engine: Engine) -> int:
        """On CUDA the allocator's peak, else the bytes of weights and KV storage that the engine uses."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        storages = [engine.kv.storage]
        models = [self.target]
        if isinstance(engine.drafter, ModelDrafter):
            storages.append(engine.drafter.kv.storage)
            models.append(engine.drafter.model)
        return sum(s.numel() * s.element_size() for s in storages) + sum(m.weights.num_bytes for m in models)

    def _run(self, engine: Engine, seqs: Seq[Sequence]) -> Generator[Chunk, None, None]:
        """Step the engine until these sequences end. Chunks of other callers' sequences go to their inboxes."""
        mine = deque[Chunk]()
        self._inboxes.update((seq.request_id, mine) for seq in seqs)
        try:
            for seq in seqs:
                engine.add(seq)
            while mine or not all(seq.finished for seq in seqs):
                while mine:
                    yield mine.popleft()
                if not all(seq.finished for seq in seqs):
                    for chunk in engine.step():
                        self._inboxes[chunk.request_id].append(chunk)
        finally:
            for seq in seqs:
                engine.abort(seq)
                self._inboxes.pop(seq.request_id, None)

    def _requests(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None
    ) -> list[Request]:
        many = _prompts(prompts)
        if not many:
            raise refuse("prompts", prompts, "at least one prompt")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(many)
        if len(params) != len(many):
            raise ParameterError(f"params has {len(params)} entries for {len(many)} prompts")
        return [
            Request(p if isinstance(p, str) else None, tuple(self._sequences(p, s)))
            for p, s in zip(many, params, strict=True)
        ]

    def _sequences(self, prompt: Prompt, params: SamplingParams) -> list[Sequence]:
        """The n sequences of one prompt; all but the first share its prompt blocks."""
        ids = tuple(self._encode(prompt))
        if len(ids) >= self.max_model_len:
            raise ParameterError(
                f"prompt has {len(ids)} tokens, must leave room below max_model_len={self.max_model_len}"
            )
        for name, given in (("logit_bias id", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            for token in given:
                if token >= self.vocab:
                    raise refuse(name, token, f"a token id below {self.vocab}")
        banned = sum(1 for value in params.logit_bias.values() if value == float("-inf"))
        if banned + len(params.bad_words) + len(params.stop_token_ids) + 16 > self.vocab:
            raise ParameterError(f"logit_bias bans {banned} of {self.vocab} tokens, must leave more to choose from")
        request_id = self._next_id
        self._next_id += params.n  # ids of its sequences
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little", signed=True)
        eos = set(self.target.config.eos_token_ids)
        if self.tokenizer.eos_id is not None:
            eos.add(self.tokenizer.eos_id)
        continues = not self.tokenizer.special_ids.issuperset(ids)
        seqs: list[Sequence] = []
        for sample_idx in range(params.n):
            seqs.append(
                Sequence(
                    seq_id=request_id + sample_idx,
                    request_id=request_id,
                    sample_idx=sample_idx,
                    prompt=ids,
                    params=params,
                    mode=self.mode(params),
                    seed=seed,
                    limit=min(len(ids) + params.max_tokens, self.max_model_len),
                    end_ids=frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos),
                    bad_words=self._bad_words(params),
                    detokenizer=Detokenizer(self.tokenizer, continues, params.skip_special_tokens),
                    stats=RequestStats(prompt_tokens=len(ids)),
                    leader=seqs[0] if seqs else None,
                )
            )
        return seqs

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise refuse("prompt", prompt, "text of at least one character, or token ids")
            try:
                return self.tokenizer.encode(prompt)
            except ValueError as error:
                raise ParameterError(f"prompt: {error}") from error
        ids = list(prompt)
        if not ids or not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < self.vocab for i in ids):
            raise refuse("prompt", ids[:8], f"text, or token ids in 0..{self.vocab - 1}")
        return ids

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences of each word, with and without a space before it."""
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            for text in (word, " " + word.lstrip(" ")):
                if ids := tuple(self.tokenizer.encode(text, add_bos=False)):
                    found[ids] = None
        return tuple(found)


def _prompts(given: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt (a string or token ids) or several, as a list."""
    if isinstance(given, str) or (len(given) > 0 and isinstance(given[0], int)):
        return [cast(Prompt, given)]
    return list(cast("Seq[Prompt]", given))


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise refuse("device", name, "cpu or cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ParameterError(f"device is {name!r}, but torch finds no CUDA device")
    return torch.device(name)
